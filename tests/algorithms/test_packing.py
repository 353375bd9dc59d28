"""Packs compared with their definition (hypothesis), and with each sequence computed separately by the plain model."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.algorithms.policy import packing
from components.algorithms.policy.packing import Pack, TokenSequence, pack
from components.errors import ArtifactError
from components.models import trie_attention
from components.models.distribution import Cut
from components.models.masks import FULL, AttentionRange
from tests.algorithms.builders import make_policy, plain_logprobs, plain_model, relative_difference, trainable


@st.composite
def sequences(draw) -> list[TokenSequence]:
    """Generate sequences of few different tokens, so that they share prefixes at many depths."""
    result = []
    for index in range(draw(st.integers(0, 8))):
        token_ids = draw(st.lists(st.integers(0, 2), min_size=2, max_size=10))
        targets = draw(st.lists(st.integers(1, len(token_ids) - 1), unique=True, max_size=5))
        logprobs = [float(-number) for number in range(len(targets))]
        result.append(
            TokenSequence(token_ids, targets, logprobs, [float(index)] * len(targets), weight=1.0 / (index + 1))
        )
    return result


def by_pack(sequences: list[TokenSequence], packs: list[Pack]) -> list[tuple[Pack, list[TokenSequence]]]:
    """Return each pack with its member sequences; each sequence is in exactly one pack."""
    members = [member for packed in packs for member in packed.members]
    assert sorted(members) == [index for index, sequence in enumerate(sequences) if sequence.targets]
    assert all(packed.members == sorted(packed.members) for packed in packs)
    return [(packed, [sequences[member] for member in packed.members]) for packed in packs]


def read(sequence: TokenSequence) -> list[int]:
    """Return the tokens that have to be computed: those before the last target."""
    return list(sequence.token_ids[: max(sequence.targets)])


def prefixes(sequences: list[TokenSequence]) -> set[tuple[int, ...]]:
    return {tuple(read(sequence)[:end]) for sequence in sequences for end in range(1, len(read(sequence)) + 1)}


def mask(packed: Pack) -> torch.Tensor:
    """Return the (N, N) mask: True where the row's node attends to the column's node."""
    nodes_N = torch.arange(len(packed.ends_N))
    return (nodes_N <= nodes_N[:, None]) & (nodes_N[:, None] < packed.ends_N)


def path(packed: Pack, node: int) -> list[int]:
    """Return the node and its ancestors, root first, from the mask alone."""
    mask_NN = mask(packed)
    ancestors = mask_NN[node].nonzero()[:, 0].tolist()
    return sorted(ancestors, key=lambda other: int(mask_NN[other].sum()))


@settings(deadline=None)
@given(sequences(), st.integers(1, 40))
def test_every_target_is_predicted_at_the_end_of_its_own_prefix(generated, most):
    for packed, members in by_pack(generated, pack(generated, most)):
        index_S = 0
        for index, sequence in enumerate(members):
            for target, logprob in zip(sequence.targets, sequence.logprobs, strict=True):
                nodes = path(packed, int(packed.predicting_U[packed.row_S[index_S]]))
                assert packed.token_ids_N[nodes].tolist() == list(sequence.token_ids[:target])
                assert packed.token_S[index_S] == sequence.token_ids[target]
                assert packed.logprob_S[index_S] == logprob
                assert packed.advantage_S[index_S] == sequence.advantages[0]
                assert packed.weight_S[index_S] == pytest.approx(sequence.weight)
                assert packed.sequence_S[index_S] == index
                index_S += 1
        assert index_S == len(packed.token_S)
        assert packed.tokens == sum(len(sequence.token_ids) for sequence in members)


@settings(deadline=None)
@given(sequences(), st.integers(1, 40))
def test_each_distinct_prefix_is_one_node(generated, most):
    for packed, members in by_pack(generated, pack(generated, most)):
        nodes = [tuple(packed.token_ids_N[path(packed, node)].tolist()) for node in range(len(packed.token_ids_N))]
        assert Counter(nodes) == Counter(prefixes(members))


@settings(deadline=None)
@given(sequences(), st.integers(1, 40))
def test_positions_count_depth_and_the_mask_holds_ancestors(generated, most):
    for packed, _ in by_pack(generated, pack(generated, most)):
        size, mask_NN = len(packed.token_ids_N), mask(packed)
        for node in range(size):
            nodes = path(packed, node)
            assert nodes[-1] == node
            assert packed.positions_N[nodes].tolist() == list(range(len(nodes)))
            for ancestor in nodes:  # a chain: descendants attend to what their ancestors attend to
                assert bool((mask_NN[node] | ~mask_NN[ancestor]).all())
        assert not bool(mask_NN.triu(1).any())


@settings(deadline=None)
@given(sequences(), st.integers(1, 40))
def test_packs_are_full(generated, most):
    packs = by_pack(generated, pack(generated, most))
    for packed, members in packs:
        assert packed.computed == len(packed.token_ids_N)
        assert packed.computed <= most or len(members) == 1
    smallest = sorted(len(packed.token_ids_N) for packed, _ in packs)[:2]
    assert len(smallest) < 2 or sum(smallest) > most  # otherwise they would be one pack


@settings(deadline=None)
@given(sequences(), st.integers(1, 40))
def test_packs_of_padded_rows_are_bounded_by_what_the_rows_hold(generated, most):
    """One row per sequence that is not a prefix of another, all padded to the longest of them."""
    packs = pack(generated, most, padded=True)
    longest = []
    for packed, members in by_pack(generated, packs):
        inputs = packing.padded_layout(packed).inputs["input_ids"]
        rows = {tuple(read(member)) for member in members}
        leaves = [row for row in rows if not any(other[: len(row)] == row for other in rows - {row})]
        assert inputs.shape == (len(leaves), max(map(len, leaves)))
        assert packed.computed == inputs.numel()
        assert packed.computed <= most or len(leaves) == 1
        for row_T, leaf in zip(inputs, sorted(leaves), strict=True):
            assert tuple(row_T[: len(leaf)].tolist()) == leaf
        longest.append((max(map(len, leaves)), min(map(len, leaves))))
    longest.sort(reverse=True)
    assert all(upper[1] >= lower[0] for upper, lower in pairwise(longest))  # rows of equal length are packed together
    assert sum(packed.computed for packed in packs) <= len(generated) * max(
        [len(read(sequence)) for sequence in generated if sequence.targets] or [0]
    )


def test_padding_is_what_a_budget_in_nodes_would_not_see():
    """One long sequence and many short ones."""
    inputs = [
        TokenSequence(list(range(100)), [99]),
        *(TokenSequence([200 + number, 1, 2], [2]) for number in range(50)),
    ]
    (together,) = pack(inputs, 200)
    assert packing.padded_layout(together).inputs["input_ids"].numel() == 51 * 99
    assert [packed.computed for packed in pack(inputs, 200, padded=True)] == [99 * 2, 49 * 2]


def test_what_shares_most_is_packed_together():
    rng = random.Random(0)
    prompts = [[rng.randrange(100) for _ in range(50)] for _ in range(4)]
    inputs = [TokenSequence([*prompt, *(rng.randrange(100) for _ in range(11))], [60]) for prompt in prompts * 6]
    rng.shuffle(inputs)
    packs = pack(inputs, 120)  # one prompt with six answers, or parts of two prompts
    assert len(packs) == 4
    assert all(len(packed.token_ids_N) == 50 + 6 * 10 for packed in packs)


@settings(deadline=None)
@given(sequences(), st.integers(1, 40), st.integers(1, 12), st.booleans(), st.sampled_from([None, 1, 3]))
def test_the_blocks_of_attention_are_the_mask(given, most, size, chunked, keys):
    for packed, reach in product(pack(given, most), (FULL, AttentionRange(size, chunked))):
        seen_NN = torch.zeros(len(packed.ends_N), len(packed.ends_N), dtype=torch.long)
        for part in trie_attention.blocks(packed.ends_N, packed.positions_N, reach, keys):
            block = torch.ones(part.last - part.first, part.stop - part.start, dtype=torch.long)
            block = block if part.allowed_QK is None else part.allowed_QK.long()
            assert block.any(-1).all()
            seen_NN[part.first : part.last, part.start : part.stop] += block.tril() if part.causal else block
        distance_NN = packed.positions_N[:, None] - packed.positions_N
        near_NN = distance_NN < size
        if chunked:
            near_NN = packed.positions_N[:, None] // size == packed.positions_N // size
        # each pair of nodes once
        assert torch.equal(seen_NN, (mask(packed) & (near_NN if reach != FULL else True)).long())


def test_nothing_to_learn_gives_no_pack():
    assert pack([], 100) == []
    assert pack([TokenSequence([1, 2, 3], [])], 100) == []


def test_unknown_logprobs_are_nan():
    (packed,) = pack([TokenSequence([1, 2, 3], [1, 2])], 100)
    assert all(math.isnan(value) for value in packed.logprob_S.tolist())


def test_a_sampled_first_token_is_refused_with_its_reason():
    with pytest.raises(ArtifactError, match="begins with a sampled token"):
        pack([TokenSequence([1, 2, 3], [0, 1])], 100)


def shared_at_several_depths(seed: int) -> list[TokenSequence]:
    """Return twelve sequences: a common prompt, then a tree of answers, lengths from 12 to 45, with targets
    throughout."""
    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, 259) for _ in range(count)]

    prompt = tokens(10)
    branches = [prompt + tokens(5) for _ in range(3)]
    result = []
    for _ in range(12):
        stem = draw.choice([prompt, *branches])
        token_ids = stem[: draw.randint(8, len(stem))] + tokens(draw.randint(2, 30))
        branches.append(token_ids)
        targets = sorted(draw.sample(range(1, len(token_ids)), draw.randint(1, 8)))
        result.append(TokenSequence(token_ids, targets, [0.0] * len(targets), weight=draw.uniform(-1, 1)))
    return result


@pytest.mark.parametrize("most", [16, 60, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_pack_computes_what_each_sequence_computes_alone(base_dir, most, temperature):
    policy = make_policy(base_dir)
    inputs = shared_at_several_depths(seed=most)
    packs = pack(inputs, most)
    packed: dict[int, list[float]] = {index: [] for index in range(len(inputs))}
    for pack_ in packs:
        logprob_S, entropy_S = policy.logprobs(pack_, Cut(temperature))
        (logprob_S * pack_.weight_S).sum().backward()
        for logprob, owner in zip(logprob_S.tolist(), pack_.sequence_S.tolist(), strict=True):
            packed[pack_.members[owner]].append(logprob)
        assert not entropy_S.requires_grad
    if most == 1000:
        assert sum(len(packed.token_ids_N) for packed in packs) < 0.8 * sum(
            len(sequence.token_ids) for sequence in inputs
        )

    plain = plain_model(base_dir, policy)
    alone = []
    for sequence in inputs:
        logprob_T = plain_logprobs(plain, sequence.token_ids, temperature)
        chosen_S = logprob_T[[target - 1 for target in sequence.targets]]
        (chosen_S.sum() * sequence.weight).backward()
        alone += chosen_S.tolist()

    assert [value for values in packed.values() for value in values] == pytest.approx(alone, abs=1e-5)
    gradients = [{name: p.grad for name, p in trainable(model).items()} for model in (policy.model, plain)]
    assert relative_difference(*gradients) <= 1e-5


def test_entropies_are_those_of_the_distributions_drawn_from(base_dir):
    policy = make_policy(base_dir)
    sequence = TokenSequence([5, 6, 7, 8, 9], [2, 4])
    _, entropy_S = policy.logprobs(pack([sequence], 100)[0], Cut(0.5))
    logits_TV = plain_model(base_dir, policy)(input_ids=torch.tensor([sequence.token_ids])).logits[0].detach()
    expected = [torch.distributions.Categorical(logits=logits_TV[index] / 0.5).entropy().item() for index in (1, 3)]
    assert entropy_S.tolist() == pytest.approx(expected, abs=1e-5)
