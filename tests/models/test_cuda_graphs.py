"""CUDA graphs on a simulated device. Its recorder replays the recorded operations and nothing else, so whatever is not
copied to a static input stays as it was; reads by the host and copies from it are errors."""

from __future__ import annotations

import asyncio
import logging
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from components.algorithms.policy import graphed
from components.algorithms.policy.graphed import GraphedDecoder
from components.algorithms.policy.packing import TokenSequence, pack, padded_nodes, trie_inputs
from components.algorithms.policy_gradient.spec import GRPOSpec
from components.inference.protocol import Sampling, TextRequest
from components.inference.transformers import batch as batches
from components.inference.transformers import decoding_graphs, state_batch
from components.inference.transformers.engine import TransformersEngine
from components.models import attention, fused_lora, gpu_attention, trie_attention
from components.models.cuda_graphs import padded_size
from components.models.layer_kinds import decoder
from components.models.weights import load_model
from tests.algorithms.builders import batch, make_context, make_policy
from tests.deployment.tiny import write_adapter
from tests.models.simulated_device import OnDevice, SimulatedDevice, SimulatedRecorder
from tests.models.test_simulated_device import responses
from tests.models.tiny_configs import tiny


@pytest.fixture(autouse=True)
def early(monkeypatch):
    """Record the first pack of a size, and small sizes."""
    monkeypatch.setattr(graphed, "RECORDED_AT", 1)
    monkeypatch.setattr(graphed, "LEAST", 8)


def packs(count: int, seed: int = 0):
    """Return packs of different shapes, of branches that share prefixes at several depths."""
    draw = random.Random(seed)

    def tokens(number):
        return [draw.randrange(3, 64) for _ in range(number)]

    made = []
    for _ in range(count):
        stem, own = tokens(draw.randint(3, 8)), tokens(4)
        ends = [own[: draw.randint(1, 4)] + tokens(draw.randint(2, 9)) for _ in range(3)]
        made += pack([TokenSequence(stem + end, [len(stem), len(stem + end) - 1]) for end in ends], 1000)
    return made


def adapted(family: str, dtype=torch.float32, **options):
    """Return a tiny model of a family with an adapter that changes it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny(family, **options), dtype=dtype).eval()
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data, std=0.2)
    return model.to(dtype)


def result(module, hidden_1ND, seed=0):
    """Return hidden states and the gradients of a fixed sum of them."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(hidden_1ND.shape, generator=generator, dtype=hidden_1ND.dtype).to(hidden_1ND.device)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = None
    (hidden_1ND * weights).sum().backward()
    grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in trained]
    return [hidden_1ND.detach(), *(grad.clone() for grad in grads)]


def test_sizes_are_few_and_close():
    sizes = {padded_size(count, 512, 4) for count in range(1, 8193)}
    assert len(sizes) == 17
    for count in range(1, 8193):
        size = padded_size(count, 512, 4)
        assert count <= size <= max(512, 1.25 * count)
        assert padded_size(size, 512, 4) == size


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_padded_packs_are_plain_ones(family):
    """Hidden states of each sequence by itself in float64, and gradients of the plain pack."""
    single = adapted(family, sliding_window=6)
    exact = adapted(family, torch.float64, sliding_window=6)
    exact.load_state_dict(single.state_dict())
    single.set_attn_implementation(attention.register())
    (packed,) = packs(1)
    count, module = len(packed.token_ids_N), decoder(single.get_base_model())
    results = []
    for size in (count, 3 * count):
        nodes = padded_nodes(packed, size)
        hidden_1ND = module(**trie_inputs(*nodes)).last_hidden_state
        assert hidden_1ND.isfinite().all()
        results.append(result(module, hidden_1ND[:, :count]))
    for plain, padded in zip(*results, strict=True):
        torch.testing.assert_close(padded, plain, atol=1e-4, rtol=1e-3)
    starts_N = packed.positions_N == 0
    assert starts_N.sum() == 1
    for leaf in [node for node in range(count) if packed.ends_N[node] == node + 1]:
        path = [node for node in range(leaf + 1) if packed.ends_N[node] > leaf]
        alone = decoder(exact.get_base_model())(input_ids=packed.token_ids_N[path][None]).last_hidden_state
        torch.testing.assert_close(results[1][0][0, path].double(), alone[0].detach(), atol=1e-4, rtol=1e-4)


def by_blocks(query, key, value, *, block_mask, scale, enable_gqa, score_mod=None):
    """FlexAttention by the formula, from the tensors of the block mask."""
    count, tile = query.shape[2], block_mask.BLOCK_SIZE[0]
    places = torch.arange(count, device=query.device)

    def pairs(numbers_11Q, indices_11QK):
        number_Q1, index_QK = numbers_11Q[0, 0, :, None], indices_11QK[0, 0].long()
        ranks_K = torch.arange(index_QK.shape[1], device=query.device)
        chosen_QK = torch.zeros_like(index_QK).scatter(1, index_QK, (ranks_K < number_Q1).long()) > 0
        return chosen_QK[places // tile][:, places // tile]

    allowed_NN = pairs(block_mask.kv_num_blocks, block_mask.kv_indices)
    allowed_NN = allowed_NN & block_mask.mask_mod(0, 0, places[:, None], places)
    allowed_NN = allowed_NN | pairs(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    grouped = query.unflatten(1, (key.shape[1], -1))
    scores = grouped @ key[:, :, None].mT * scale
    scores = (scores if score_mod is None else score_mod(scores)).masked_fill(~allowed_NN, -torch.inf)
    return (scores.softmax(-1) @ value[:, :, None]).flatten(1, 2)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text"])
def test_replays_compute_packs_and_parameters_of_any_kind(family, blocks, monkeypatch):
    """Six packs of a few sizes, and other parameters before the fifth."""
    if blocks:
        monkeypatch.setattr(trie_attention, "DENSE_NODES", 0)
        monkeypatch.setattr(gpu_attention, "TILE", 8)
        monkeypatch.setattr(gpu_attention, "flex_works", lambda *_: True)
        monkeypatch.setattr(gpu_attention, "_compiled", lambda: by_blocks)
    model = adapted(family, sliding_window=6)
    model.set_attn_implementation(attention.register())
    with SimulatedDevice():
        model.to("meta")
        assert fused_lora.fuse(model)
        module = decoder(model.get_base_model())
        graphs = GraphedDecoder(module, SimulatedRecorder())
        for number, packed in enumerate([*packs(3), *packs(3)]):
            if number == 4:
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.mul_(0.9)
            packed, count = packed.to("meta"), len(packed.token_ids_N)
            hidden_1ND = graphs.hidden(packed)
            found = result(module, hidden_1ND[:, :count])
            plain = module(**trie_inputs(packed.token_ids_N, packed.positions_N, packed.ends_N)).last_hidden_state
            for replayed, eager in zip(found, result(module, plain), strict=True):
                torch.testing.assert_close(replayed.values, eager.values, atol=3e-5, rtol=1e-4)
        assert 1 < len(graphs._recorded) <= 3


@pytest.fixture
def graphs():
    """Graphs of a small decoder on the simulated device."""
    model = adapted("llama")
    model.set_attn_implementation(attention.register())
    with SimulatedDevice():
        model.to("meta")
        yield GraphedDecoder(decoder(model.get_base_model()), SimulatedRecorder())


def test_activations_of_a_pack_stay_until_its_backward_pass(graphs):
    first, second = (packed.to("meta") for packed in packs(2))
    hidden = graphs.hidden(first)
    assert graphs.hidden(second) is None  # would overwrite what the first backward pass reads
    hidden.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can be computed only once"):
        hidden.sum().backward()
    del hidden
    with torch.no_grad():
        assert graphs.hidden(second) is None
    assert graphs.hidden(second) is not None  # dropped without a backward pass
    assert graphs.hidden(second) is not None


def test_gradients_of_packs_add_up(graphs):
    """Autograd keeps the first gradient that it gets as that of the parameter."""
    (first,) = packs(1)
    parameters = [parameter for parameter in graphs._decoder.parameters() if parameter.requires_grad]
    sums = []
    for _ in range(3):
        graphs.hidden(first.to("meta")).sum().backward()
        sums.append([parameter.grad.values.clone() for parameter in parameters])
    for single, *totals in zip(*sums, strict=True):
        for number, total in enumerate(totals, 2):
            torch.testing.assert_close(total, number * single)


def test_moved_weights_are_recorded_again(graphs):
    (packed,) = packs(1)
    before = graphs.hidden(packed.to("meta")).values.clone()
    parameter = next(parameter for parameter in graphs._decoder.parameters() if parameter.requires_grad)
    parameter.values = parameter.values.detach().clone() + 1
    assert not torch.equal(graphs.hidden(packed.to("meta")).values, before)
    assert len(graphs._recorded) == 1


def test_a_model_that_the_host_reads_goes_on_without_graphs(caplog):
    """Routed experts of transformers are computed one by one, for those that occur."""

    class Reading(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1))

        def forward(self, input_ids, **_):
            largest = int(input_ids.max())
            return SimpleNamespace(last_hidden_state=input_ids[..., None] * self.scale * largest)

    (packed,) = packs(1)
    with SimulatedDevice(), caplog.at_level(logging.WARNING):
        graphs = GraphedDecoder(Reading().to("meta"), SimulatedRecorder())
        assert graphs.hidden(packed.to("meta")) is None
        assert graphs.hidden(packed.to("meta")) is None
    assert caplog.text.count("training goes on without graphs") == 1
    assert "_local_scalar_dense" in caplog.text


def trained(policy, scratch):
    """Return the parameters after two gradient steps."""
    optimizer = torch.optim.AdamW(policy.parameters.values())
    scratch.mkdir()
    spec = GRPOSpec(learning_rate=1e-2, minibatches=2, pack_tokens=64, kl_coefficient=0.1)
    spec.build(make_context(policy, optimizer, batch(), scratch=scratch)).train()
    return {name: parameter.detach() for name, parameter in policy.parameters.items()}


def test_graphed_steps_are_those_of_the_cpu(base_dir, tmp_path, monkeypatch):
    expected = trained(make_policy(base_dir), tmp_path / "cpu")
    policy, replayed = make_policy(base_dir), []
    forward = graphed._Pass.forward
    monkeypatch.setattr(graphed._Pass, "forward", lambda *args: replayed.append(args) or forward(*args))
    with SimulatedDevice():
        policy.model.to("meta")
        policy.device = "meta"
        fused_lora.fuse(policy.model)
        policy.graphs = GraphedDecoder(decoder(policy.base), SimulatedRecorder())
        found = trained(policy, tmp_path / "device")
    assert len(replayed) >= 3
    for name, parameter in found.items():
        assert isinstance(parameter, OnDevice)
        torch.testing.assert_close(parameter.values, expected[name], atol=1e-3, rtol=0)


@pytest.fixture
def graphed_engine(on_device, monkeypatch):
    """Let engines on the simulated device use graphs of at least two rows, of 16, 24, 32, … tokens."""
    monkeypatch.setattr(decoding_graphs, "ROWS", (2, 1))
    monkeypatch.setattr(decoding_graphs, "WIDTH", (16, 2))
    monkeypatch.setattr(batches, "GraphRecorder", SimulatedRecorder)
    monkeypatch.setattr(state_batch, "require_gpu", lambda device: None)
    return on_device


def test_graphed_responses_are_those_of_the_cpu(base_dir, adapter_dir, graphed_engine):
    expected, expected_logprobs, _, _ = responses(base_dir, adapter_dir, "cpu")
    graphed_engine()
    with SimulatedDevice():
        found, logprobs, waits, _ = responses(base_dir, adapter_dir, "meta", cuda_graphs=True)
    assert found == expected
    assert logprobs == pytest.approx(expected_logprobs, abs=1e-5)
    assert waits["aten._local_scalar_dense.default"] <= 3  # prefill only: the host knows the width of a decoding pass


def conversation(base_dir, adapters, device, **options):
    """Return the tokens of a text, of another one while the first one's slot is parked, of a continuation of the first
    one, and all again with another adapter; their log-probabilities, the prefilled tokens, the sizes of the graphs."""
    engine = TransformersEngine(base_dir, max_length=48, device=device, slots=2, **options)
    completions = []

    async def converse():
        for version, adapter in adapters.items():
            engine.load_policy(version, str(adapter))
            for prompt in ([5, 6, 7, 8, 9], [40, 41, 42], [5, 6, 7, 8, 9, 10, 11, 12]):
                completions.append(await engine.complete(TextRequest(prompt, version, Sampling(max_tokens=4), seed=1)))
        await engine._task
        return list(engine.batch.graphs._replays) if options else []

    sizes = asyncio.run(converse())
    logprobs = [value for completion in completions for value in completion.logprobs]
    return [each.token_ids for each in completions], logprobs, engine.counters["prefilled_tokens"], sizes


def test_parked_slots_and_graphs_outlast_other_rows_and_policies(base_dir, tmp_path, graphed_engine):
    adapters = {f"v{seed}": write_adapter(base_dir, tmp_path / str(seed), seed=seed) for seed in (1, 2)}
    expected, expected_logprobs, prefilled, _ = conversation(base_dir, adapters, "cpu")
    graphed_engine()
    with SimulatedDevice():
        found, logprobs, found_prefilled, sizes = conversation(base_dir, adapters, "meta", cuda_graphs=True)
    assert found == expected
    assert found_prefilled == prefilled
    assert logprobs == pytest.approx(expected_logprobs, abs=1e-5)
    assert sizes == [(2, 16)]  # recorded for the first policy


def test_attention_of_cudnn_is_off_on_a_gpu(base_dir):
    """It plans anew for each length."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    with pytest.raises((AssertionError, RuntimeError)):  # torch without CUDA
        load_model(base_dir, device="cuda")
    assert not torch.backends.cuda.cudnn_sdp_enabled()
