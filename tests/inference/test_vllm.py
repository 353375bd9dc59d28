"""Tests of the vLLM engine and its server against a small server with vLLM's endpoints over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from components.errors import ContextOverflow, ResourceError, StalePolicy, WaitTimeout
from components.inference.engines.vllm import VllmSpec
from components.inference.protocol import ChatRequest, LogitChange, Sampling
from components.inference.vllm.engine import VllmEngine
from components.inference.vllm.memory import share_of
from components.inference.vllm.router import Router
from components.inference.vllm.server import VllmServer, capture_size, environment, options
from tests.deployment.tiny import TINY, write_adapter

HELLO = ChatRequest([{"role": "user", "content": "hello"}], sampling=Sampling(0.5, 0.9, 4, 64, 0.05), seed=2**63 + 7)


def ask(engine: VllmEngine, request: ChatRequest = HELLO):
    return asyncio.run(engine.chat(request))


def seen(server: VllmServer, path: str) -> list[dict]:
    return [body for asked, body in requests(server) if asked == path]


def requests(server: VllmServer) -> list[tuple[str, dict]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/seen") as answer:
        return json.load(answer)


def die(server: VllmServer) -> None:
    with contextlib.suppress(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/die", data=b"{}")


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_an_answer_is_asked_for_and_given_in_tokens(start, connect):
    server = start()
    engine = connect(server)
    completion = ask(engine)
    [asked] = seen(server, "/v1/completions")
    assert asked["prompt"] == completion.prompt_token_ids == engine.format.prompt_ids(HELLO.messages, [])
    assert {name: asked[name] for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")} == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.05, "max_tokens": 64, "seed": 7
    }  # fmt: skip
    assert asked["stop_token_ids"] == sorted(engine.stop_ids)
    assert (completion.message["content"], completion.finish_reason, completion.policy) == ("policy/7", "stop", "base")
    assert len(completion.token_ids) == len(completion.logprobs) == len("policy/7") + 1
    further = [*HELLO.messages, completion.message, {"role": "user", "content": "more"}]
    again = ask(engine, replace(HELLO, messages=further))
    assert again.prompt_token_ids[: len(completion.prompt_token_ids) + len(completion.token_ids)] == [
        *completion.prompt_token_ids, *completion.token_ids
    ]  # fmt: skip
    greedy = ask(engine, replace(HELLO, sampling=Sampling(0, 0.9, max_tokens=3)))
    assert greedy.finish_reason == "length"
    assert "top_p" not in seen(server, "/v1/completions")[-1]
    with pytest.raises(ContextOverflow, match=r"prompt and answer have at most 512"):
        ask(engine, ChatRequest([{"role": "user", "content": "a" * 600}]))


def test_changed_logits_are_the_servers_parameters(start, connect):
    server = start()
    engine = connect(server)
    answer = ask(engine, replace(HELLO, change=LogitChange(((5, 1.0),), presence=0.5, frequency=-0.5)))
    asked = seen(server, "/v1/completions")[-1]
    assert asked["logit_bias"] == {"5": 1.0}
    assert (asked["presence_penalty"], asked["frequency_penalty"]) == (0.5, -0.5)
    assert answer.altered
    assert not ask(engine).altered


def test_an_adapter_becomes_the_policy_and_every_answer_is_its_own(start, connect, adapter_dir):
    server = start()
    engine = connect(server)
    engine.load_policy("v1", str(adapter_dir))
    with pytest.raises(StalePolicy, match="asked for policy base, but the engine holds v1"):
        ask(engine)
    assert ask(engine, replace(HELLO, policy="v1")).message["content"] == "policy@v1/7"
    engine.load_policy("v2", str(adapter_dir))
    with pytest.raises(StalePolicy):
        ask(engine, replace(HELLO, policy="v1"))
    connect(server).load_policy("v2", str(adapter_dir))  # another engine of the run finds it there
    assert [body["lora_name"] for body in seen(server, "/v1/load_lora_adapter")] == ["policy@v1", "policy@v2"]
    engine.load_policy("base", None)
    assert ask(engine).message["content"] == "policy/7"


def test_what_the_server_has_is_read_back_and_asserted(start, connect, adapter_dir):
    engine = connect(start(fault="forgets"))
    with pytest.raises(StalePolicy, match="was given policy@v1"):
        engine.load_policy("v1", str(adapter_dir))
    assert engine.policy == "base"
    engine = connect(start(fault="liar"))
    with pytest.raises(StalePolicy, match=r"asked for policy base \(policy\), and other answered"):
        ask(engine)


@pytest.mark.parametrize("on_swap", ["abort", "finish"])
def test_answers_under_way_are_given_up_or_finished(start, connect, adapter_dir, on_swap):
    engine = connect(start(fault={"abort": "stuck", "finish": "slow"}[on_swap]), on_swap=on_swap)

    async def swap():
        asked = asyncio.ensure_future(engine.chat(HELLO))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(engine.load_policy, "v1", str(adapter_dir))
        return await asked

    if on_swap == "finish":
        assert asyncio.run(swap()).policy == "base"
        assert ask(engine).policy == "base"  # the next turn of the same episode
    else:
        with pytest.raises(StalePolicy, match="policy base was replaced by v1"):
            asyncio.run(swap())
    assert ask(engine, replace(HELLO, policy="v1")).policy == "v1"


def test_a_server_that_dies_is_started_again_and_given_its_adapter(start, connect, adapter_dir):
    server = start(restarts=1)
    engine = connect(server)
    engine.load_policy("v1", str(adapter_dir))
    first = server.pid
    die(server)
    assert ask(engine, replace(HELLO, policy="v1")).message["content"] == "policy@v1/7"
    assert (server.starts, server.pid != first) == (2, True)
    die(server)
    deadline = time.monotonic() + 600
    while server.dead is None and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(ResourceError, match=r"died with exit code 3(.|\n)*started 2 times \(inference.restarts=1\)"):
        server.check()


def test_a_server_that_was_given_all_weights_is_not_started_again(start, connect, base_dir):
    """It would have the base model's weights, under the same name."""
    server = start(restarts=1, max_lora_rank=0)
    connect(server).load_policy("base", None)
    die(server)
    deadline = time.monotonic() + 600
    while server.dead is None and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(ResourceError, match=r"(.|\n)*A second start would serve the base model's weights"):
        server.check()
    assert server.starts == 1


def test_a_server_that_dies_at_its_start_is_shown_with_the_first_error_of_its_log(start):
    with pytest.raises(
        ResourceError,
        match=r"ended at its start with exit code 1\. Its log: .*/vllm\.log\. Its first error: ValueError: No "
        r"available memory for the cache blocks\.\n  File .*api_server\.py\", line \d+, in load\n"
        r"Remedy: .*inference\.gpu_memory",
    ):
        start(fault="dies")
    with pytest.raises(WaitTimeout, match=r"waited 0.5 s \(inference.start_timeout\)"):
        start(fault="hangs", start_timeout=0.5)


def test_what_is_not_there_or_taken_is_said(start, tmp_path):
    with pytest.raises(ResourceError, match=r"inference.python: .*make vllm"):
        start(python=str(tmp_path / "nowhere"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ResourceError, match=rf"inference.port: port {port} .*choose another"):
            start(port=port)


OWNER = """
import os, sys
from pathlib import Path
from components.inference.engines.vllm import VllmSpec
from components.inference.vllm.server import VllmServer
from components.models.spec import ModelSpec
model, python, log = sys.argv[1:]
spec, log = VllmSpec(python=python), Path(log)
server = VllmServer(spec, ModelSpec(name="tiny", source="random"), Path(model), log, log.with_name("compiled"))
server.wait()
print(server.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_server_does_not_outlive_a_run_that_is_killed(python, base_dir, tmp_path):
    command = [sys.executable, "-c", OWNER, str(base_dir), python, str(tmp_path / "vllm.log")]
    owner = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert owner.returncode == -signal.SIGKILL
    pid = int(owner.stdout)
    deadline = time.monotonic() + 600
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(pid)


def test_it_ends_with_the_run(start):
    server = start()
    server.close()
    assert gone(server.pid)


def test_an_adapter_that_the_server_cannot_take_is_refused(start, connect, base_dir, adapter_dir, tmp_path):
    engine = connect(start(max_lora_rank=8))
    large = write_adapter(base_dir, tmp_path / "large", seed=2, rank=12)
    with pytest.raises(ResourceError, match=r"has rank 12, more than the server takes .*inference.max_lora_rank=12"):
        engine.load_policy("v1", str(large))
    shutil.copytree(adapter_dir, tmp_path / "moved")
    (tmp_path / "whole").mkdir()
    shutil.copy(base_dir / "model.safetensors", tmp_path / "whole")
    with pytest.raises(ResourceError, match=r"holds all weights, and the vLLM server .* is given adapters"):
        engine.load_policy("v2", str(tmp_path / "whole"))
    assert engine.policy == "base"


def test_a_server_of_another_model_is_found_out(start, connect, base_dir, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(base_dir, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["x"], vocabulary["y"] = vocabulary["y"], vocabulary["x"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ResourceError, match=r"inference.urls: the tokenizer of .* is not that of model.name"):
        connect(start(other))
    with pytest.raises(ResourceError, match=r"--logprobs-mode processed_logprobs"):
        connect(start(fault="raw"), ours=False)


def test_the_turns_of_an_episode_go_to_one_server(start, connect):
    servers = [start(), start()]
    engine = connect(*servers, ours=False)

    async def episode(seed: int) -> None:
        request = replace(HELLO, seed=seed)
        for _ in range(3):
            completion = await engine.chat(request)
            request = replace(
                request, messages=[*request.messages, completion.message, {"role": "user", "content": "on"}]
            )

    async def episodes() -> None:
        await asyncio.gather(*(episode(seed) for seed in range(4)))

    asyncio.run(episodes())
    played = [
        {body["seed"] for body in seen(server, "/v1/completions") if body["max_tokens"] == 64} for server in servers
    ]
    assert [len(trajectory) for trajectory in played] == [2, 2]
    assert played[0] | played[1] == {0, 1, 2, 3}


def test_requests_go_where_the_fewest_are():
    router = Router(3)
    assert [router.take() for _ in range(4)] == [0, 1, 2, 0]
    router.release(2)
    assert router.take() == 2
    router.record_response("talk", 1)
    assert [router.take("talk") for _ in range(3)] == [1, 1, 1]
    assert router.failed(1)  # there are others
    assert router.take("talk") == 2
    assert router.failed(0)
    assert not router.failed(2)
    assert router.under_way == [2, 4, 2]


def test_the_server_is_started_for_the_model(base_dir):
    spec = VllmSpec(max_lora_rank=12, arguments={"tensor_parallel_size": 2, "disable-log-stats": True})
    values = options(spec, TINY, base_dir, 8123, on_cpu=True)
    assert values[:4] == ["--host", "127.0.0.1", "--port", "8123"]
    for name, value in (
        ("max-lora-rank", "16"),
        ("dtype", "float32"),
        ("tensor-parallel-size", "2"),
        ("structured-outputs-config.backend", "guidance"),
    ):
        assert values[values.index(f"--{name}") + 1] == value
    assert {"--enforce-eager", "--enable-lora", "--disable-log-stats"} <= set(values)
    on_gpu = VllmSpec(max_batch=65, prefix_caching=False, quantization="fp8", speculative={"method": "ngram"}, sleep=2)
    values = options(on_gpu, TINY, base_dir, 8123, on_cpu=False)
    for name, value in (
        ("gpu-memory-utilization", "0.5"),
        ("max-cudagraph-capture-size", "72"),
        ("quantization", "fp8"),
        ("speculative-config", '{"method": "ngram"}'),
    ):
        assert values[values.index(f"--{name}") + 1] == value
    assert {"--no-enable-prefix-caching", "--enable-sleep-mode"} <= set(values)
    assert [capture_size(requests) for requests in (1, 3, 5, 64, 257)] == [1, 4, 8, 64, 272]
    assert share_of(60 * 2**30, 80 * 2**30, sleeps=False) == 0.37
    assert share_of(60 * 2**30, 80 * 2**30, sleeps=True) == 0.67
    assert environment(on_gpu, False, base_dir)["VLLM_CACHE_ROOT"] == str(base_dir)
    assert environment(spec, True, base_dir)["VLLM_CPU_KVCACHE_SPACE"] == "2"
    with pytest.raises(ValueError, match="host is set by the run"):
        VllmSpec(arguments={"host": "0.0.0.0"})


def test_between_stages_the_servers_sleep(start, connect, adapter_dir):
    server = start(sleep=1)
    engine = connect(server)
    assert "policy/7" in ask(engine).message["content"]
    engine.release()
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/is_sleeping") as answer:
        assert json.load(answer) == {"is_sleeping": True}
    engine.load_policy("v1", str(adapter_dir))  # as the next stage does first
    assert ask(engine, replace(HELLO, policy="v1")).policy == "v1"
    engine.release()
    assert ask(connect(server)).policy == "base"


def test_a_server_that_cannot_sleep_says_what_it_needs(start, connect):
    with pytest.raises(ResourceError, match=r"inference.sleep: .*VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"):
        connect(start(), ours=False, sleep=1)
