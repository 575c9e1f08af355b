"""What /metrics says, held against what was done."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from alula.engine.memory import memory_bytes
from alula.model.load import LoadedModel
from tests.draft.heads import save_random_head
from tests.server.running import Running, build_engine, serving
from tests.server.test_cancel import BYSTANDER, post

BODY: dict[str, Any] = BYSTANDER | {"max_tokens": 24}


def scraped(server: Running) -> dict[tuple[str, str], float]:
    """(name, the label besides model_name and le) -> value."""
    text = httpx.get(f"{server.url}/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in ("model_name", "le")}
            if "le" not in sample.labels:
                found[sample.name, ",".join(labels.values())] = sample.value
    return found


def test_counts_are_those_of_the_engine(tiny: LoadedModel, tiny_folder: Any) -> None:
    engine = build_engine(tiny, tiny_folder)
    with serving(engine) as server:
        for n in (1, 2):
            usage = post(server, BODY | {"n": n, "temperature": 0}).json()["usage"]
        server.idle()
        found = scraped(server)
    totals = engine.totals
    assert found["alula:generation_tokens_total", ""] == totals.committed == 72
    assert found["alula:target_forwards_total", ""] == totals.target_forwards
    assert found["alula:spec_decode_num_drafts_total", ""] == totals.drafts > 0
    assert found["alula:spec_decode_num_draft_tokens_total", ""] == totals.drafted
    assert found["alula:spec_decode_num_accepted_tokens_total", ""] == totals.accepted > 40
    assert found["alula:spec_decode_num_checked_tokens_total", ""] == totals.checked
    by_depth = [found["alula:spec_decode_num_accepted_tokens_per_pos_total", str(place)] for place in range(5)]
    assert by_depth == [totals.accepted_by_depth[depth] for depth in range(1, 6)]
    assert found["alula:tree_nodes_count", ""] == found["alula:accepted_tokens_per_forward_count", ""]
    assert found["alula:tree_nodes_sum", ""] == totals.verified_rows
    assert found["alula:accepted_tokens_per_forward_sum", ""] == totals.accepted
    assert found["alula:prompt_tokens_total", ""] == 4
    assert found["alula:request_success_total", "length"] == 3
    assert found["alula:time_to_first_token_seconds_count", ""] == 2
    assert found["alula:request_params_n_sum", ""] == 3
    assert found["alula:request_generation_tokens_sum", ""] == 72
    assert found["alula:iteration_tokens_total_sum", ""] == 72
    assert found["alula:http_requests_total", "POST,/v1/completions,200"] == 2
    assert (found["alula:num_requests_running", ""], found["alula:num_requests_waiting", ""]) == (0, 0)
    assert found["alula:kv_cache_usage_perc", ""] == 0
    assert found["alula:steps_total", ""] == engine.times.steps
    stages = {stage for name, stage in found if name == "alula:step_stage_seconds_total"}
    assert stages == {"draft", "tree", "forward", "sample", "commit", "other"}
    assert usage["completion_tokens"] == 48


def test_time_to_the_first_token_counts_what_a_form_takes_to_compile(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(tiny)
    compiled = engine.grammars._compile
    monkeypatch.setattr(engine.grammars, "_compile", lambda wanted: time.sleep(0.3) or compiled(wanted))
    with serving(engine) as server:
        post(server, {"prompt": "x", "max_tokens": 9, "structured_outputs": {"choice": ["yes", "no"]}})
        found = scraped(server)
    names = ("time_to_first_token", "request_queue_time", "e2e_request_latency")
    assert min(found[f"alula:{name}_seconds_sum", ""] for name in names) >= 0.3
    seconds = [found[f"alula:request_{part}_time_seconds_sum", ""] for part in ("queue", "prefill", "decode")]
    assert sum(seconds) == pytest.approx(found["alula:e2e_request_latency_seconds_sum", ""])


def test_a_tag_labels_acceptance_and_there_are_few_of_them(tiny: LoadedModel, tiny_folder: Any) -> None:
    with serving(build_engine(tiny, tiny_folder), max_tags=2) as server:
        for tag in ("code", "chat", "code", "third", "bad tag!"):
            post(server, BODY, headers={"x-alula-tag": tag})
        post(server, BODY)
        found = scraped(server)
    committed = {tag: value for (name, tag), value in found.items() if name == "alula:tag_committed_tokens_total"}
    assert committed == {"code": 48, "chat": 24, "other": 72}
    assert found["alula:tag_accepted_tokens_total", "code"] > 24


def test_h4_two_servers_in_one_process_count_for_themselves(tiny: LoadedModel) -> None:
    """vLLM #24049: counters of several engines fell into one."""
    with serving(build_engine(tiny)) as one, serving(build_engine(tiny)) as other:
        post(one, BODY)
        assert scraped(one)["alula:generation_tokens_total", ""] == 24
        assert scraped(other)["alula:generation_tokens_total", ""] == 0
        assert ("alula:request_success_total", "length") not in scraped(other)


def test_memory_of_an_eagle_head(tiny: LoadedModel, tmp_path: Any) -> None:
    """Its own tensors count, the embedding it shares does not."""
    from safetensors import safe_open

    from alula.draft.load import load_drafter

    folder = save_random_head(tmp_path / "head", tiny)
    engine = build_engine(tiny, drafter=load_drafter(folder, tiny, allow_unverified=True))
    with safe_open(folder / "model.safetensors", "pt") as file:
        sizes = {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118
    own = 4 * sum(size for name, size in sizes.items() if name != "embed_tokens.weight")
    with serving(engine) as server:
        found = scraped(server)
    weights = found["alula:memory_bytes", "drafter_weights"]
    assert own * 0.9 < weights < own * 1.6, "the layers, d2t and the rotation table"
    parts = memory_bytes(engine, 0)
    layout, pages = engine.cache.layout, engine.cache.total_pages
    assert parts["target_kv"] + parts["draft_kv"] + parts["features"] == pages * layout.page_bytes
    assert parts["features"] == pages * layout.feature_size * 4 > 0
    assert engine.cache.extra_kv_bytes == parts["draft_kv"] + parts["features"]
