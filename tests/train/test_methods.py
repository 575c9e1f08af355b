"""Every method the whole way: it learns a tiny data set, resumes bitwise, and is exported to what serves."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from alula.config import AlulaError
from alula.draft.load import load_drafter, target_provenance
from alula.draft.policy import TreePolicy
from alula.engine.metrics import DraftStats
from alula.model.load import LoadedModel, load_model
from alula.train.batch import Batch, make_batch
from alula.train.config import Recipe
from alula.train.data import Conversation
from alula.train.evaluate import evaluate
from alula.train.features import FeatureStore
from alula.train.methods.method import Maker, Setting
from alula.train.methods.options import Eagle1Options, Eagle3Options, LMOptions, MedusaOptions, MethodOptions
from alula.train.methods.select import maker
from alula.train.simulate import Written, simulate
from alula.train.target import DecoderTarget
from alula.train.trainer import Trainer
from alula.tree import TreeShape
from tests.engine.tiny import complete, engine_for, prompt_of, save_tiny_llama

OPTIONS: dict[str, MethodOptions] = {
    "eagle3": Eagle3Options(steps=3, draft_vocab_size=240, intermediate_size=64),
    "eagle3.1": Eagle3Options(steps=3, draft_vocab_size=240, intermediate_size=64, fc_norm=True, norm_output=True),
    "lk": Eagle3Options(steps=2, draft_vocab_size=240, intermediate_size=64, acceptance=0.5),
    "eagle1": Eagle1Options(intermediate_size=64),
    "medusa": MedusaOptions(heads=3, layers=2),
    "lm": LMOptions(hidden_size=32, heads=4, intermediate_size=48, layers=2, train_embedding=True),
}
RECIPE = Recipe(total_tokens=100_000, tokens_per_batch=120, warmup_tokens=100, matrix_rate=0.02, other_rate=2e-3)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_tiny_llama(tmp_path_factory.mktemp("target"), layers=3), dtype="float32")


@pytest.fixture(scope="module")
def data(target: LoadedModel) -> list[Conversation]:
    """What the target itself says, so that a drafter that has learned it is accepted."""
    engine = engine_for(target)
    texts = []
    for seed in range(12):
        prompt = prompt_of(6, seed=seed)
        answer = complete(engine, prompt, max_tokens=14, ignore_eos=True).outputs[0].token_ids
        texts.append(Conversation((*prompt, *answer), (False,) * 6 + (True,) * 14))
    return texts


@pytest.fixture(params=list(OPTIONS))
def options(request: pytest.FixtureRequest) -> MethodOptions:
    return OPTIONS[request.param]


def setting_for(made: Maker, target: LoadedModel, data: Sequence[Conversation]) -> Setting:
    store = FeatureStore(DecoderTarget(target), taps=made.taps(target.config.num_layers), dtype=torch.float32)
    return Setting(target, store, data[:2], seed=0)  # start values fitted on these leave something to learn


def new_trainer(options: MethodOptions, target: LoadedModel, data: Sequence[Conversation]) -> Trainer:
    made = maker(options)
    setting = setting_for(made, target, data)
    return Trainer(made.fresh(setting), setting.store, RECIPE, lambda: data, seed=0)


def batch_of(trainer: Trainer, data: Sequence[Conversation]) -> Batch:
    return make_batch(data, trainer.store.get(data))


def losses(entry: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in entry.items() if name.startswith("loss_")}


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """As if it had been written to disk."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def test_it_learns_and_what_it_exports_is_accepted(
    tmp_path: Path, options: MethodOptions, target: LoadedModel, data: list[Conversation]
) -> None:
    running = new_trainer(options, target, data)
    batch = batch_of(running, data)
    start = evaluate(running.method, [batch], steps=2)[0].top1
    first = sum(losses(running.train_step()).values())
    for _ in range(50):
        last = sum(losses(running.train_step()).values())
    reached = evaluate(running.method, [batch], steps=2)[0].top1
    assert last < first - 0.2 and reached > max(0.3, start + 0.1), (first, last, start, reached)
    running.method.export(tmp_path / "head", {"target": target_provenance(target)})
    _check_served(tmp_path / "head", target, data, running)
    _check_going_on(tmp_path / "head", options, target, data, running)


def _check_served(folder: Path, target: LoadedModel, data: Sequence[Conversation], running: Trainer) -> None:
    """The text is that of plain decoding, and as many drafts are accepted as training expects."""
    shape = TreeShape(8, 3, 2)
    drafter = load_drafter(folder, target)
    assert drafter.name == running.method.name.split(".")[0]
    engine = engine_for(target, drafter, shape=shape)
    served, expected = DraftStats(), DraftStats()
    for text in data[:6]:
        found = complete(engine, text.tokens[:6], max_tokens=14, ignore_eos=True)
        assert found.outputs[0].token_ids == list(text.tokens[6:])
        served.add(found.outputs[0].stats)
        after = Conversation(text.tokens, tuple(place > 6 for place in range(20)))
        branches = running.method.branches(batch_of(running, [after]))
        expected.add(simulate(Written(6, text.tokens, 14), branches, TreePolicy(), shape))
    assert served.tau > 1.3
    assert served.tau == pytest.approx(expected.tau, rel=0.1)


def _check_going_on(
    folder: Path, options: MethodOptions, target: LoadedModel, data: Sequence[Conversation], running: Trainer
) -> None:
    """A method that starts from the export proposes what the exported one did, but for the rounding to bf16."""
    made = maker(options)
    again = made.continued(setting_for(made, target, data), folder)
    batch = batch_of(running, data)
    ours, theirs = (evaluate(method, [batch], steps=2)[0].top1 for method in (running.method, again))
    assert theirs == pytest.approx(ours, abs=0.05)


@pytest.mark.parametrize("cut", [1, 4])
def test_a_run_cut_and_resumed_is_the_same_run(
    options: MethodOptions, target: LoadedModel, data: list[Conversation], cut: int
) -> None:
    whole = new_trainer(options, target, data)
    expected = [losses(whole.train_step()) for _ in range(6)]
    first = new_trainer(options, target, data)
    found = [losses(first.train_step()) for _ in range(cut)]
    state = copied(first.state())
    made = maker(options)
    setting = setting_for(made, target, data)
    second = Trainer(made.resumed(setting, state), setting.store, RECIPE, lambda: data, seed=0)
    second.restore(state)
    found += [losses(second.train_step()) for _ in range(6 - cut)]
    assert found == expected
    for name, ours in second.method.module.state_dict().items():
        assert torch.equal(ours, whole.method.module.state_dict()[name]), name


def test_what_is_the_targets_stays_and_is_not_saved(
    options: MethodOptions, target: LoadedModel, data: list[Conversation]
) -> None:
    """Embedding and LM head of the target are read by every method; none trains or saves them."""
    running = new_trainer(options, target, data)
    before = [tensor.clone() for tensor in (running.store.target.embedding_VD, running.store.target.lm_head_VD)]
    served = target.decoder.embedding_VD.clone()
    for _ in range(3):
        running.train_step()
    for now, then in zip((running.store.target.embedding_VD, running.store.target.lm_head_VD), before, strict=True):
        assert torch.equal(now, then) and not now.requires_grad
    assert torch.equal(target.decoder.embedding_VD, served)
    shared = {tensor.data_ptr() for tensor in (running.store.target.embedding_VD, running.store.target.lm_head_VD)}
    assert not shared & {tensor.data_ptr() for tensor in running.method.module.state_dict().values()}


@pytest.mark.parametrize("trained", [False, True])
def test_a_students_embedding_is_trained_only_if_asked_for(
    target: LoadedModel, data: list[Conversation], trained: bool
) -> None:
    running = new_trainer(replace(OPTIONS["lm"], train_embedding=trained), target, data)
    before = {name: p.detach().clone() for name, p in running.method.module.named_parameters()}
    running.train_step()
    moved = {name for name, p in running.method.module.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if trained or "embed" not in name}


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_later_guesses_weigh_less(kind: str, target: LoadedModel, data: list[Conversation]) -> None:
    running = new_trainer(OPTIONS[kind], target, data)
    made = running.method.losses(batch_of(running, data), torch.Generator())
    assert [(loss.name, loss.weight) for loss in made] == [(f"loss_{i}", pytest.approx(0.8**i)) for i in range(3)]


def test_bf16_products_give_nearly_the_same_losses(
    options: MethodOptions, target: LoadedModel, data: list[Conversation]
) -> None:
    found = []
    for precision in ("fp32", "bf16"):
        running = new_trainer(options, target, data)
        running.recipe = replace(RECIPE, precision=precision)
        running.train_step()  # new Medusa heads are zero, which nothing rounds
        found.append(losses(running.train_step()))
    exact, rounded = found
    assert rounded != exact
    assert rounded == {name: pytest.approx(value, rel=0.03) for name, value in exact.items()}
    assert all(p.dtype == torch.float32 for p in running.method.module.parameters())


@pytest.mark.parametrize(
    ("kind", "other", "named"),
    [
        ("eagle1", Eagle1Options(intermediate_size=48), "intermediate_size"),
        ("medusa", MedusaOptions(heads=2, layers=2), "heads"),
        ("medusa", MedusaOptions(heads=3, layers=1), "layers"),
        ("lm", LMOptions(hidden_size=32, heads=4, intermediate_size=64, layers=2), "intermediate_size"),
        ("lm", LMOptions(hidden_size=32, heads=4, intermediate_size=48, layers=1), "num_hidden_layers"),
    ],
)
def test_going_on_from_another_size_names_it(
    tmp_path: Path, target: LoadedModel, data: list[Conversation], kind: str, other: MethodOptions, named: str
) -> None:
    new_trainer(OPTIONS[kind], target, data).method.export(tmp_path / "head", None)
    made = maker(other)
    with pytest.raises(AlulaError, match=named):
        made.continued(setting_for(made, target, data), tmp_path / "head")


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Eagle3Options(steps=0), "steps"),
        (lambda: Eagle3Options(acceptance=1.5), "acceptance"),
        (lambda: Eagle1Options(noise=-1.0), "noise"),
        (lambda: Eagle1Options(regression=0.0, classification=0.0), "regression"),
        (lambda: MedusaOptions(heads=0), "heads"),
        (lambda: LMOptions(hidden_size=30, heads=4), "hidden_size"),
        (lambda: LMOptions(heads=6, kv_heads=4), "kv_heads"),
    ],
)
def test_options_that_cannot_be_are_refused(make: Callable[[], MethodOptions], named: str) -> None:
    with pytest.raises(AlulaError, match=named):
        make()


def test_a_student_wider_than_its_target_is_refused(target: LoadedModel, data: list[Conversation]) -> None:
    made = maker(LMOptions(hidden_size=96, heads=4))
    with pytest.raises(AlulaError, match="hidden_size is 96"):
        made.fresh(setting_for(made, target, data))
