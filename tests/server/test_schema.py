"""The OpenAPI document, and whatever a fuzzer makes of it: no answer is a 5xx."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error

from alula.model.load import LoadedModel
from tests.server.running import Running, build_engine, serving

EXAMPLES = 30
"""Bodies per operation."""


@pytest.fixture(scope="module")
def limited(tiny: LoadedModel) -> Iterator[Running]:
    """Any prompt and any parameters, but short answers."""
    with serving(build_engine(tiny), max_output_tokens=4, max_samples=4, request_timeout_s=20.0) as running:
        yield running
        running.idle()


def test_the_document_names_every_path(server: Running) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    assert set(document["paths"]) == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/requests/{request_id}",
        "/v1/requests/{request_id}/abort",
        "/v1/models",
        "/v1/models/{name}",
        "/tokenize",
        "/detokenize",
        "/health",
        "/version",
        "/metrics",
    }
    responses = [set(entry["responses"]) for path in document["paths"].values() for entry in path.values()]
    assert all("200" in each and "422" not in each for each in responses)


@pytest.mark.slow
def test_a_fuzzer_finds_no_5xx(limited: Running) -> None:
    schema = schemathesis.openapi.from_url(f"{limited.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) == 11
    statuses = set()
    for operation in operations:

        @seed(1)
        @settings(
            max_examples=EXAMPLES if operation.method == "post" else 5,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        @given(st.data())
        def fuzz(data: st.DataObject) -> None:
            case = data.draw(operation.as_strategy())  # noqa: B023 (used before the next round)
            reply = case.call(timeout=60)
            statuses.add(reply.status_code)
            case.validate_response(reply, checks=[not_a_server_error])

        fuzz()
    assert {200, 400} <= statuses
