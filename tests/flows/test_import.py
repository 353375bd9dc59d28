"""From a file of one's own to a trained checkpoint, at the level of stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from components.algorithms.sft.trainer import examples
from components.data.forms import FORMS
from components.errors import ResourceError, SpecError
from components.models.weights import folder, load_tokenizer
from components.trajectories.chat import ChatFormat
from components.trajectories.store import load_scored, read_scores, read_trajectories
from flows.experiment.compose import compose
from flows.experiment.prompts import check_prompts
from flows.experiment.requests import Requests
from flows.experiment.starting_point import StartingPoint
from flows.planning.plan import plan
from flows.recipes.offline import offline
from flows.recipes.run import Run
from flows.stages import STAGES
from flows.stages.base import Context
from flows.stages.execute import request_key, run_stage
from flows.stages.import_data import ImportStage, summary_text
from tests.data import rows as samples
from tests.data.test_logs import FOLDER as LOG_FILES
from tests.data.test_logs import LOGS
from tests.flows.declarations import check_artifact
from tests.flows.pretend import run_stages, spec_of

MODEL = {"name": "tiny", "source": "random", "max_length": 400, "lora": {"rank": 4}, "device": "cpu"}
COMMON = {"learning_rate": 1e-2, "pack_tokens": 512}
SFT = {"name": "sft", **COMMON}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "preference": {"name": "dpo", **COMMON},
    "ranking": {"name": "dpo", "pairs": "all", **COMMON},
    "thumbs": {"name": "kto", **COMMON},
}
"""Algorithm by form; SFT for the others."""


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    context = Context.at(tmp_path_factory.mktemp("root"))
    yield context
    context.warm.close()


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def requests(root: Path, path: Path, algorithm: dict[str, Any] = SFT, **data: Any) -> Requests:
    changes = {"model": MODEL, "algorithm": algorithm, "data": {"path": str(path), **data}}
    return Requests(spec_of(root, **changes))


def imported(context: Context, path: Path, **data: Any):
    """Return the artifact of an import of a file, and its status."""
    return run_stage(requests(context.cache.parent, path, **data).import_data(), context)


def trajectories(artifact):
    names = ("trajectories.parquet", "scores.parquet", "selection.parquet")
    return load_scored(*(artifact.path / name for name in names))


@pytest.mark.parametrize("form", samples.FORMS)
def test_each_form_is_imported_and_trained_on(context, tmp_path, form):
    path = write(tmp_path / "a.jsonl", samples.FORMS[form])
    made = requests(context.cache.parent, path, ALGORITHMS.get(form, SFT))
    artifact, status = run_stage(made.import_data(), context)
    assert (status, artifact.kind) == ("ran", "dataset")
    assert artifact.metrics["examples"] == 4
    assert check_artifact(artifact.path) == "import"
    assert json.loads((artifact.path / "report.json").read_text())["form"] == form
    fed = dict.fromkeys(("trajectories", "scores", "selection"), artifact)
    checkpoint, _ = run_stage(made.train(fed, 1, start=None, reference=None), context)
    log = [json.loads(line) for line in (checkpoint.path / "log.jsonl").read_text().splitlines()]
    assert log
    assert all(entry["grad_norm"] > 0 for entry in log)
    examples_per_row = 3 if form == "ranking" else 1
    assert checkpoint.metrics["examples"] == 4 * examples_per_row


def test_pairs_are_checked_right_after_the_import(tmp_path, context):
    path = write(tmp_path / "a.jsonl", samples.FORMS["messages"])
    spec = spec_of(context.cache.parent, model=MODEL, algorithm=ALGORITHMS["preference"], data={"path": str(path)})
    spec = spec.model_copy(update={"flow": compose(["flow=offline", "algorithm=dpo", f"data.path={path}"]).flow})
    called = []

    def call(label, step, request):
        called.append(label)
        return run_stage(request, context)[0]

    with pytest.raises(SpecError, match="data: algorithm=dpo learns nothing from this data; it needs preference pairs"):
        offline(Run(spec, call), spec)
    assert called == ["import", "filter[import]"]


def test_preferences_are_learned_from_scored_conversations_of_one_id(context, tmp_path):
    rows = [
        {"id": f"q{n}", "prompt": f"p {n}", "completion": f"a {n} {good}", "reward": good}
        for n in (1, 2)
        for good in (0, 1)
    ]
    made = requests(context.cache.parent, write(tmp_path / "a.jsonl", rows), ALGORITHMS["preference"])
    artifact, _ = run_stage(made.import_data(), context)
    fed = dict.fromkeys(("trajectories", "scores", "selection"), artifact)
    checkpoint, _ = run_stage(made.train(fed, 1, start=None, reference=None), context)
    assert checkpoint.metrics["examples"] == 2


def test_a_reward_model_learns_from_imported_pairs(context, tmp_path):
    path = write(tmp_path / "a.jsonl", samples.FORMS["preference"])
    reward_model = {"scenarios": 4, "algorithm": {"name": "reward_model", "held_out": 0.25, **COMMON}}
    spec = spec_of(context.cache.parent, model=MODEL, data={"path": str(path)}, reward_model=reward_model)
    made = Requests(spec)
    artifact, _ = run_stage(made.import_data(), context)
    collection = {"trajectories": artifact, "scores": artifact}
    model, _ = run_stage(made.train_reward([collection], start=None, member=1), context)
    assert model.metrics["pairs"] == 3
    assert model.metrics["heldout_pairs"] == 1


def test_heads_of_a_reward_model_learn_the_preferences_that_name_them(context, tmp_path):
    names = ("helpful", "harmless")
    answers = {"helpful": ("yes, 5", "no"), "harmless": ("no", "yes, 5")}  # the two heads disagree
    rows = [
        {"prompt": f"Is it {number}?", "head": name, **dict(zip(("chosen", "rejected"), answers[name], strict=True))}
        for number in range(6)
        for name in names
    ]
    path = write(tmp_path / "a.jsonl", rows)
    heads = {"helpful": 2.0, "harmless": 0.5}
    algorithm = {"name": "reward_model", "held_out": 0.25, "heads": heads, "epochs": 8, **COMMON}
    reward_model = {"data": {"path": str(path)}, "algorithm": algorithm}
    spec = spec_of(context.cache.parent, model=MODEL, reward_model=reward_model)
    StartingPoint.resolve(spec, context.store)
    made = Requests(spec)
    artifact, _ = run_stage(made.import_data(spec.reward_model.data, "reward_model.data"), context)
    assert (artifact.metrics["examples"], artifact.metrics["comparable"]) == (12, 12)
    components = [score.components for score in read_scores(artifact.path / "scores.parquet")]
    assert components[:4] == [{"helpful": 1.0}, {"helpful": 0.0}, {"harmless": 1.0}, {"harmless": 0.0}]
    collection = {"trajectories": artifact, "scores": artifact}
    model, _ = run_stage(made.train_reward([collection], start=None, member=1), context)
    assert model.metrics["pairs"] + model.metrics["heldout_pairs"] == 12
    assert {model.metrics[f"heldout_accuracy/{name}"] for name in names} == {1.0}
    algorithm["heads"] = {"honest": 1.0}
    with pytest.raises(SpecError, match=r"heads: honest: .* name no such head \(column head: harmless, helpful\)"):
        StartingPoint.resolve(spec_of(context.cache.parent, model=MODEL, reward_model=reward_model), context.store)


PROMPTS = [f"Name the colour number {number}." for number in range(12)]


def rlhf(context: Context, folder: Path, prompts: list[str], *overrides: str):
    """Return the spec of RLHF from three files."""
    demonstrations = write(folder / "sft.jsonl", samples.FORMS["prompt_completion"])
    pairs = write(folder / "pairs.jsonl", samples.FORMS["preference"])
    (folder / "prompts.txt").write_text("\n".join(prompts))
    paths = {"data": demonstrations, "reward_model.data": pairs, "environment": folder / "prompts.txt"}
    lines = [f"{section}.path={path}" for section, path in paths.items()]
    held = ["environment.heldout_share=0.4", "data.heldout=0.3", "reward_model.algorithm.held_out=0.5"]
    cache = [f"environment.cache={folder / 'cache'}", f"root={context.cache.parent}", "evaluate.scenarios=2"]
    return compose(["flow=rlhf", "size=tiny", *lines, *held, *cache, "deploy.mode=none", *overrides])


def test_rlhf_names_each_file_that_it_lacks():
    with pytest.raises(SpecError) as refused:
        compose(["flow=rlhf"])
    keys = [problem.path for problem in refused.value.problems]
    assert keys == ["environment.path", "data.path", "reward_model.data.path"]


def test_rlhf_from_three_files(context, tmp_path):
    spec = rlhf(context, tmp_path, PROMPTS)
    artifacts = {}

    def call(label, step, request):
        artifacts[label], _ = run_stage(request, context)
        return artifacts[label]

    outcome = Run(spec, call).execute()
    metrics = artifacts["train[reward]"].metrics
    assert (metrics["pairs"], metrics["heldout_pairs"]) == (2, 2)
    assert metrics["epoch/2/heldout_accuracy"] == metrics["heldout_accuracy"]
    assert "calibration_error" in metrics
    for name in ("start", "sft", "final"):
        scores = read_scores(artifacts[f"judge[heldout {name}]"].path / "scores.parquet")
        rewards = [score.reward for score in scores]
        assert len(rewards) == 2
        assert outcome.reported[f"held-out reward-model score, {name}"] == pytest.approx(sum(rewards) / 2)
    collected = read_trajectories(artifacts["collect[1]"].path / "trajectories.parquet")
    talks = [trajectory.histories[0].messages for trajectory in collected]
    assert {messages[0].content for messages in talks} <= set(PROMPTS)
    assert [len(messages) for messages in talks] == [2] * 4  # a prompt and its answer


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused(context, tmp_path):
    limit = ["model.max_length=200"]
    empty = Context.at(tmp_path / "empty")
    fitting = rlhf(context, tmp_path, [*PROMPTS, "x" * 120], *limit)
    check_prompts(fitting, context.cache, prepares=True)
    spec = rlhf(context, tmp_path, [*PROMPTS, "y" * 250], *limit)
    check_prompts(spec, empty.cache, prepares=False)  # without the model the tokens are unknown
    match = r"environment\.prompt: 1 prompt has no room .* model\.max_length=200 tokens; the first has 2\d\d: 'yyy"
    with pytest.raises(SpecError, match=match):
        check_prompts(spec, context.cache, prepares=True)
    with pytest.raises(SpecError, match=match):
        plan(spec)


def test_messages_without_loss_are_read_and_not_trained_on(context, tmp_path):
    artifact, _ = imported(context, write(tmp_path / "a.jsonl", samples.FORMS["agenttraj"][:1]))
    spec = spec_of(context.cache.parent, model=MODEL).model
    tokenizer = load_tokenizer(folder(spec, context.cache))
    (row,) = examples(ChatFormat(tokenizer), trajectories(artifact), 400)
    assert "OK" in tokenizer.decode(row["input_ids"])
    assert tokenizer.decode([row["input_ids"][target] for target in row["targets"]]) == "Action: buy[0]<|im_end|>"


def test_the_log_of_a_library_becomes_a_checkpoint_that_learned_calls_and_answers(tmp_path):
    text = (LOG_FILES / "openllmetry_console.json").read_text()  # one trace with two calls of the model
    trace = json.JSONDecoder().raw_decode(text)[0]["context"]["trace_id"]
    degrees = {"Oslo": 2, "Rome": 19, "Lima": 23}
    for number, (city, value) in enumerate(degrees.items()):
        own = text.replace(trace, f"0x{number:032x}").replace("Oslo", city).replace("2 degrees", f"{value} degrees")
        (tmp_path / f"spans{number}.json").write_text(own)
    arguments = ["+experiment=sft", "model=tiny", f"data.path='{tmp_path}/spans[01].json'", f"root={tmp_path}/root"]
    spec = compose([*arguments, "data.heldout=null", f"data.heldout_path={tmp_path}/spans2.json"])
    run, outcome = run_stages(spec)
    context = Context.at(spec.root)
    data = context.store.find(run.stages[0].key)
    assert (data.kind, data.metrics["examples"], data.metrics["heldout"]) == ("dataset", 2, 1)
    tokenizer = load_tokenizer(folder(spec.model, context.cache))
    rows = list(examples(ChatFormat(tokenizer), trajectories(data), spec.model.max_length))
    assert len(rows) == 2
    for row in rows:
        whole, learned = (
            tokenizer.decode(ids) for ids in (row["input_ids"], [row["input_ids"][at] for at in row["targets"]])
        )
        (city,) = (city for city in degrees if city in learned)
        call, answer = f'[weather(city="{city}")]<|im_end|>', f"It has {degrees[city]} degrees.<|im_end|>"
        assert learned == call + answer
        assert (
            whole.index(f"Weather in {city}?") < whole.index(call) < whole.index(f"{degrees[city]} degrees<|im_end|>")
        )
    assert outcome.checkpoint.metrics["sampled_tokens"] == sum(len(row["targets"]) for row in rows)
    assert check_artifact(outcome.checkpoint.path) == "train"


def test_held_out_rows_are_in_a_folder_of_their_own(context, tmp_path):
    artifact, _ = imported(context, write(tmp_path / "a.jsonl", samples.FORMS["thumbs"]), heldout=0.5)
    assert check_artifact(artifact.path) == "import"
    held = {trajectory.id for trajectory in read_trajectories(artifact.path / "heldout" / "trajectories.parquet")}
    assert len(held) == artifact.metrics["heldout"] > 0
    assert len(trajectories(artifact)) == artifact.metrics["examples"] == 4 - len(held)


def test_the_key_is_that_of_the_content(context, tmp_path):
    root = context.cache.parent
    path = write(tmp_path / "a.jsonl", samples.FORMS["thumbs"])
    artifact, _ = imported(context, path)
    copy = tmp_path / "deep" / "b.jsonl"
    copy.parent.mkdir()
    again, status = imported(context, write(copy, samples.FORMS["thumbs"]))
    assert (status, again.key) == ("cached", artifact.key)
    assert imported(context, path, form="thumbs")[1] == "cached"
    for changed in ({"limit": 2}, {"near_duplicates": "ignore"}, {"heldout": 0.5}, {"form": "prompt_completion"}):
        assert request_key(requests(root, path, **changed).import_data(), context) != artifact.key
    write(copy, samples.FORMS["thumbs"][:2])
    assert request_key(requests(root, copy).import_data(), context) != artifact.key
    spec = ImportStage.model_validate(requests(root, path).import_data().spec)
    for template in ({"chat_template": "{{ 1 }}"}, {"chat_template_kwargs": {"a": 1}}, {"keep_reasoning": True}):
        model = spec.model.model_copy(update=template)
        assert spec.model_copy(update={"model": model}).key_part() != spec.key_part(), template


def test_a_source_that_changes_during_the_run_is_refused(context, tmp_path):
    path = write(tmp_path / "a.jsonl", samples.FORMS["thumbs"][:3])
    request = requests(context.cache.parent, path).import_data()
    write(path, samples.FORMS["thumbs"][:1])
    with pytest.raises(ResourceError, match="changed after the start of the run"):
        run_stage(request, context)


def test_a_mistake_names_its_key(context, tmp_path):
    root = context.cache.parent
    with pytest.raises(SpecError, match=r"data\.path: there is no file .*away\.jsonl"):
        requests(root, tmp_path / "away.jsonl").import_data()
    path = write(tmp_path / "a.jsonl", [*samples.FORMS["thumbs"], {"prompt": "", "completion": "a", "label": 1}])
    with pytest.raises(SpecError, match=r"data\.heldout_path: there is no file"):
        requests(root, path, heldout_path=str(tmp_path / "away.jsonl")).import_data()
    with pytest.raises(SpecError, match=r"data\.path: empty: 1 rows have an empty prompt.*a\.jsonl:5 \("):
        imported(context, path, on_problem="strict")
    with pytest.raises(SpecError, match=r"data\.path: needs a value: data\.path=FILE"):
        Requests(spec_of(root)).import_data()


def test_the_command_line_sets_the_path_alone(tmp_path):
    path = write(tmp_path / "a.jsonl", samples.FORMS["messages"])
    for group in ([], ["data=file"]):
        spec = compose(["+experiment=smoke", *group, f"data.path={path}", "data.form=auto"])
        assert spec.data.path == str(path)
        assert Requests(spec).import_data().spec["data"]["form"] == "messages"
    for group in ("file", "huggingface"):
        with pytest.raises(SpecError, match=r"data\.path: null, but .* expected data\.path=FILE"):
            compose(["+experiment=smoke", f"data={group}"])
    mapped = compose(["+experiment=smoke", f"data.path={path}", "data.columns={messages: talk}"])
    assert mapped.data.mapped == {"messages": "talk"}
    with pytest.raises(SpecError, match=r"data\.form: 'thumb': expected one of .*Did you mean 'thumbs'"):
        compose(["+experiment=smoke", f"data.path={path}", "data.form=thumb"])
    with pytest.raises(SpecError, match=r"data\.heldout: 0: .*; expected more than 0, or deploy=none"):
        compose(["+experiment=sft", f"data.path={path}", "environment=none", "data.heldout=0"])
    with pytest.raises(SpecError, match=r"data\.heldout_path: set together with heldout"):
        compose(["+experiment=smoke", f"data.path={path}", "data.heldout=0.1", "data.heldout_path=b.jsonl"])


def test_the_summary_names_form_rows_and_checks():
    assert summary_text({}) == ""
    counts = {"rows": 10.0, "examples": 6.0, "heldout": 1.0, "dropped": 3.0, "form/thumbs": 6.0}
    metrics = {**counts, "dropped/empty": 1.0, "dropped/too_long": 2.0}
    assert summary_text(metrics) == "form thumbs: used 6 of 10 rows, 1 held out; dropped 2 too_long, 1 empty"
    repeated = {**counts, "dropped": 0.0, "similar": 5.0}
    expected = "form thumbs: used 6 of 10 rows, 1 held out; near duplicates among the used rows: 5"
    assert summary_text(repeated) == expected


def test_every_form_is_tested():
    assert {*samples.FORMS, "trajectories", "served", *LOGS.values()} == set(FORMS)
    assert STAGES["import"].kind == "dataset"
