"""Long documents in chunks and windows, and the memory that a pass takes."""

import copy

import pytest
import torch

from tests.memory import Live
from tests.reference import rank_of
from treeopt.calibrate import observe as module
from treeopt.calibrate.continuations import Continuation, dataset_documents
from treeopt.calibrate.observe import Candidates, document_states, observe
from treeopt.calibrate.run import CalibrationSettings, calibrate
from treeopt.heads import MedusaHeads
from treeopt.prompts import Prompt
from treeopt.targets.forward import Forward

CONTEXT = 256  # of the tiny target


@pytest.fixture(scope="module")
def exact(tiny_target, tiny_heads):
    """Return the tiny models in float64: how products are cut up moves no rank."""
    target = copy.deepcopy(tiny_target).double()
    heads = MedusaHeads.for_target(target, 4)
    heads.load_state_dict({name: value.double() for name, value in tiny_heads.state_dict().items()})
    return Forward(target), heads


def text(length, seed=0):
    return tuple(torch.randint(1, 13, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def plain(forward, heads, document):
    """Rank every token one position at a time, behind the window that is to hold it."""
    ids = [*document.prompt, *document.tokens]
    rows = []
    for i in range(len(document.tokens)):
        place = len(document.prompt) - 1 + i
        end = CONTEXT
        while end <= place:
            end += CONTEXT // 2
        end = min(end, len(ids) - 1)
        window = torch.tensor([ids[max(0, end - CONTEXT) : place + 1]])
        hidden = forward.target.model(window).last_hidden_state[0, -1]
        logits, row = heads(hidden), []
        for head in range(heads.num_heads):
            true = i + 1 + head
            row.append(rank_of(logits[head].tolist(), document.tokens[true]) if true < len(document.tokens) else -1)
        rows.append(row)
    return rows


@torch.no_grad()
@pytest.mark.parametrize("budget", [8, 16, 60, 61])
@pytest.mark.parametrize("prompt", [1, 5, 40])
def test_a_document_longer_than_a_pass_has_the_ranks_of_one_pass(exact, monkeypatch, budget, prompt):
    document = Continuation("a", None, text(prompt, 1), text(60, 2))
    batch = [document, Continuation("b", None, (3,), (1, 4, 1, 5))]
    whole = observe(*exact, batch, Candidates(3, 0.7))
    monkeypatch.setattr(module, "OBSERVED_TOKENS", budget)
    for found, expected in zip(observe(*exact, batch, Candidates(3, 0.7)), whole):
        assert found.ranks.tolist() == expected.ranks.tolist()
        assert found.topk_probs.numpy() == pytest.approx(expected.topk_probs.numpy(), abs=1e-6)
        assert found.entropies.numpy() == pytest.approx(expected.entropies.numpy(), abs=1e-6)


@torch.no_grad()
@pytest.mark.parametrize(
    ("prompt", "tokens"), [(3, 254), (3, 255), (10, 300), (200, 190), (256, 20), (257, 1), (257, 30), (500, 140)]
)
def test_a_document_longer_than_the_context_is_read_in_windows_each_position_once(exact, monkeypatch, prompt, tokens):
    taken = []
    take = module._Reading.take

    def noting(reading, rows, states):
        taken.extend(rows.tolist())
        assert len(states) == len(rows)
        take(reading, rows, states)

    monkeypatch.setattr(module._Reading, "take", noting)
    document = Continuation("a", None, text(prompt, 1), text(tokens, 2))
    (found,) = observe(*exact, [document], Candidates())
    assert taken == list(range(tokens))
    assert found.ranks.tolist() == plain(*exact, document)


@torch.no_grad()
def test_documents_of_all_lengths_go_together_in_any_order(exact):
    documents = [
        Continuation(str(i), None, text(prompt, i), text(tokens, i + 50))
        for i, (prompt, tokens) in enumerate([(300, 0), (5, 3), (2, 0), (30, 290), (4, 1), (1, 9)])
    ]
    for document, found, states in zip(
        documents, observe(*exact, documents, Candidates()), document_states(exact[0], documents)
    ):
        assert found.ranks.tolist() == plain(*exact, document)
        assert states.shape == (len(document.tokens), 32)


@torch.no_grad()
def test_training_reads_the_same_states_in_chunks(exact, monkeypatch):
    document = Continuation("a", None, text(7, 1), text(60, 2))
    (whole,) = document_states(exact[0], [document])
    monkeypatch.setattr(module, "OBSERVED_TOKENS", 12)
    (found,) = document_states(exact[0], [document])
    assert found.shape == (60, 32)
    assert found.numpy() == pytest.approx(whole.numpy(), abs=1e-9)


def test_a_reply_longer_than_the_context_is_calibrated_whole(tiny_loaded, tiny_heads, tmp_path):
    reply = " ".join(str(1 + token % 9) for token in text(400))
    prompts = [Prompt("long", ({"role": "user", "content": "1 2 3"},), reply=reply)]
    documents = dataset_documents(tiny_loaded, prompts, max_new_tokens=350)
    assert len(documents[0].tokens) == 350
    settings = CalibrationSettings(continuations="dataset", max_new_tokens=1000)
    trace = calibrate(tiny_loaded, tiny_heads, prompts, tmp_path / "t.safetensors", settings)
    assert trace.counts()[1].tolist() == [399, 398, 397, 396]


# Memory


def test_the_meter_sees_what_is_alive_at_once():
    with Live() as live:
        first = torch.zeros(1000)
        view = first[10:]
        del first
        second = view + 1
        del view
        third = second * 2
    assert live.most == 4 * (1000 + 990)
    assert live.now == 4 * (990 + 990)
    assert third.shape == (990,)


@torch.no_grad()
@pytest.mark.parametrize(("positions", "candidates"), [(2048, Candidates()), (128, Candidates(10, 0.7))])
def test_five_heads_over_a_vocabulary_of_128k_take_a_quarter_of_one_head_s_logits(positions, candidates):
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary = 128 * 1024
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    target = LlamaForCausalLM(config).eval()
    heads = MedusaHeads.for_target(target, 5)
    tokens = tuple(torch.randint(vocabulary, (positions,)).tolist())
    forward = Forward(target)
    with Live() as live:
        (found,) = observe(forward, heads, [Continuation("a", None, (1, 2, 3), tokens)], candidates)
    assert (found.ranks[:, 0] >= 0).sum() == positions - 1
    # Bytes. One head's logits over 2,048 positions are 1 GiB in float32; seen were 48 and 193 MiB.
    assert live.most < 1 << 28


def test_a_gpu_gets_more_rows_at_once_and_fewer_when_guesses_are_judged():
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 1)
    assert module.chunk_rows(128 * 1024, cpu, Candidates()) == 48
    assert module.chunk_rows(128 * 1024, cuda, Candidates()) == 512
    assert module.chunk_rows(128 * 1024, cuda, Candidates(10)) == 128
    assert module.chunk_rows(1 << 30, cpu, Candidates()) == 1
