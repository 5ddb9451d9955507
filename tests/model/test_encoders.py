"""Encoders against sentence-transformers and transformers themselves, on tiny random models."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from encoder_models import (
    FAMILIES,
    MAX_TOKENS,
    WIDTH,
    encoder_tokenizer,
    save_encoder,
    save_modules,
)
from transformers import AutoModelForSequenceClassification

from penstock.gpu_worker.model.encoders.embedder import Embedder
from penstock.gpu_worker.model.encoders.encoder_recipe import (
    checkpoint_kind,
    read_recipe,
)
from penstock.gpu_worker.model.encoders.length_groups import length_groups
from penstock.gpu_worker.model.encoders.scorer import Classifier, Reranker
from penstock.shared.errors import InvalidRequest, ModelError, UnsupportedModel
from penstock.shared.protocol.states import ModelKind

if TYPE_CHECKING:  # other test files need not wait for it
    from sentence_transformers import CrossEncoder, SentenceTransformer

pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = ["a", "Encoders read both ways.", "", "ünïcode — too", "x" * 50, "Queues hold work. " * 3]
POOLINGS = ["cls", "mean", "max", "lasttoken", "mean_sqrt_len_tokens", "weightedmean"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A bare encoder's folder by family; made once, and not to be changed."""
    made: dict[tuple[str, int], Path] = {}

    def get(model_type: str, labels: int = 0) -> Path:
        if (model_type, labels) not in made:
            folder = tmp_path_factory.mktemp(model_type)
            made[model_type, labels] = save_encoder(model_type, folder, labels=labels)
        return made[model_type, labels]

    return get


@pytest.fixture(scope="module")
def bert(checkpoint: Callable[..., Path]) -> Embedder:
    embedder = Embedder(checkpoint("bert"))
    embedder.load()
    return embedder


def loaded(folder: Path, **options: Any) -> Embedder:
    embedder = Embedder(folder, device="cpu", **options)
    embedder.load()
    return embedder


def vectors(answer: Any) -> np.ndarray:
    assert not isinstance(answer, InvalidRequest), answer
    return np.stack([np.frombuffer(packed, "<f4") for packed in answer["embeddings"]])


def reference(folder: Path, **options: Any) -> SentenceTransformer:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu", local_files_only=True, **options)


def cross_encoder(folder: Path) -> CrossEncoder:
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(folder), device="cpu", local_files_only=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bare_encoder_is_what_sentence_transformers_makes_of_it(
    family: str, checkpoint: Callable[..., Path]
) -> None:
    folder = checkpoint(family)
    (answer,) = loaded(folder).infer([{"input": TEXTS}])
    expected = reference(folder).encode(TEXTS)
    np.testing.assert_allclose(vectors(answer), expected, atol=1e-5)
    assert answer["tokens"] == sum(len(ids) for ids in encoder_tokenizer(family)(TEXTS).input_ids)


@pytest.mark.parametrize("family", ["bert", "qwen3"])
@pytest.mark.parametrize("mode", POOLINGS)
def test_every_pooling(mode: str, family: str, tmp_path: Path) -> None:
    folder = save_modules(save_encoder(family, tmp_path), mode, normalize=True)
    (answer,) = loaded(folder).infer([{"input": TEXTS}])
    model = reference(folder)
    # Position weights count from the first token, also where sentence-transformers pads before it.
    np.testing.assert_allclose(vectors(answer), model.encode(TEXTS), atol=1e-5)


def test_modules_as_sentence_transformers_saves_them(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Several poolings, a layer behind them, prompts that do not count in the pooling."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    transformer = modules.Transformer(
        str(checkpoint("roberta")), max_seq_length=40, do_lower_case=True
    )
    pooling = modules.Pooling(WIDTH, ("cls", "mean"), include_prompt=False)
    torch.manual_seed(3)
    dense = modules.Dense(2 * WIDTH, 12, activation_function=torch.nn.Tanh())
    model = SentenceTransformer(
        modules=[transformer, pooling, dense, modules.Normalize()],
        prompts={"query": "Find: ", "other": "Other: "},
        default_prompt_name="other",
        device="cpu",
    )
    model.save(str(tmp_path))
    embedder = loaded(tmp_path)
    texts = ["A Text in CAPITALS", "b"]
    items = [{"input": texts}, {"input": texts, "prompt_name": "query"}, {"input": texts[:1]}]
    default, query, first = embedder.infer(items)
    np.testing.assert_allclose(vectors(default), model.encode(texts), atol=1e-5)
    expected = model.encode(texts, prompt_name="query")
    np.testing.assert_allclose(vectors(query), expected, atol=1e-5)
    np.testing.assert_allclose(vectors(first), model.encode(texts[:1]), atol=1e-5)
    assert embedder.encoder.max_tokens == 40
    (refused,) = embedder.infer([{"input": texts, "prompt_name": "poem"}])
    assert "document, other, query" in str(refused)


def test_dimensions_are_cut_and_brought_to_length_one_again(tmp_path: Path) -> None:
    folder = save_modules(save_encoder("bert", tmp_path), "mean", normalize=True)
    embedder = loaded(folder)
    whole, short = embedder.infer([{"input": TEXTS}, {"input": TEXTS, "dimensions": 5}])
    cut = vectors(whole)[:, :5]
    np.testing.assert_allclose(
        vectors(short), cut / np.linalg.norm(cut, axis=1, keepdims=True), atol=1e-6
    )
    expected = reference(folder, truncate_dim=5).encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(vectors(short), expected, atol=1e-5)


def test_normalize_is_an_option_where_the_checkpoint_does_not(bert: Embedder) -> None:
    plain, unit = bert.infer([{"input": TEXTS}, {"input": TEXTS, "normalize": True}])
    assert not np.allclose(np.linalg.norm(vectors(plain), axis=1), 1)
    np.testing.assert_allclose(np.linalg.norm(vectors(unit), axis=1), 1, atol=1e-6)


def test_half_precision_is_near(checkpoint: Callable[..., Path], bert: Embedder) -> None:
    half = loaded(checkpoint("bert"), dtype="bfloat16")
    item = {"input": TEXTS, "normalize": True}
    (near,), (exact,) = half.infer([item]), bert.infer([item])
    assert (vectors(near) * vectors(exact)).sum(1).min() > 0.999


def test_a_batch_changes_no_item(bert: Embedder) -> None:
    items = [{"input": [text]} for text in TEXTS]
    together = np.concatenate([vectors(answer) for answer in bert.infer(items)])
    alone = np.concatenate([vectors(bert.infer([item])[0]) for item in items])
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_token_ids_are_taken_as_they_are(bert: Embedder) -> None:
    ids = encoder_tokenizer("bert")("some text").input_ids
    by_text, by_ids = bert.infer([{"input": ["some text"]}, {"input": [ids]}])
    assert by_text == by_ids


BAD_ITEMS = [
    ({"input": "text"}, "input", "a list of at least one text"),
    ({"input": []}, "input", "a list of at least one text"),
    ({"input": ["a"] * 2049}, "input", "at most 2048 texts"),
    ({"input": [1, 2]}, "input[0]", "text, or token ids"),
    ({"input": ["a", []]}, "input[1]", "text, or token ids"),
    ({"input": [["a", "b"]]}, "input[0]", "text, or token ids"),
    ({"input": [[5, -1]]}, "input[0]", "text, or token ids"),
    ({"input": [[5, 10_000]]}, "input[0]", "token ids below 261"),
    ({"input": ["\ud800"]}, "input[0]", "UTF-8"),
    ({"input": ["ok", "x" * 100]}, "input[1]", "at most 64 tokens"),
    ({"input": ["a"], "dimensions": 0}, "dimensions", "1 to 32"),
    ({"input": ["a"], "dimensions": 33}, "dimensions", "1 to 32"),
    ({"input": ["a"], "dimensions": True}, "dimensions", "1 to 32"),
    ({"input": ["a"], "truncate": 1}, "truncate", "true or false"),
    ({"input": ["a"], "prompt_name": ["x"]}, "prompt_name", "document, query"),
    ({"input": ["a"], "size": 1}, "size", "dimensions, input"),
    ({}, "input", "a list of at least one text"),
    (b"bytes", "payload", "a map"),
    (None, "payload", "a map"),
]


def test_a_bad_item_is_refused_at_its_place_alone(bert: Embedder) -> None:
    good = {"input": ["good"]}
    (expected,) = bert.infer([good])
    items = [part for item, _, _ in BAD_ITEMS for part in (good, item)]
    answers = bert.infer(items)
    np.testing.assert_allclose(vectors(answers[0]), vectors(expected), atol=1e-5)
    for (_, field, allowed), answer in zip(BAD_ITEMS, answers[1::2], strict=True):
        assert isinstance(answer, InvalidRequest)
        assert answer.field == field
        assert allowed in answer.allowed
    assert not any(isinstance(answer, InvalidRequest) for answer in answers[::2])
    assert bert.infer([]) == []


def test_truncation_on_request_is_sentence_transformers(
    bert: Embedder, checkpoint: Callable[..., Path]
) -> None:
    text = "many words, " * 20
    (answer,) = bert.infer([{"input": [text, list(range(5, 200))], "truncate": True}])
    assert answer["tokens"] == 2 * MAX_TOKENS
    expected = reference(checkpoint("bert")).encode([text])
    np.testing.assert_allclose(vectors(answer)[:1], expected, atol=1e-5)


def test_costs_are_about_tokens(bert: Embedder) -> None:
    assert bert.cost({"input": [[1] * 9, [2] * 4]}) == 13
    assert 10 <= bert.cost({"input": ["x" * 40]}) <= 14
    assert bert.cost(None) == 1


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "modernbert", "qwen3"])
def test_a_reranker_scores_as_cross_encoder(family: str, checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(family, 1)
    reranker = Reranker(folder, device="cpu")
    reranker.load()
    query, documents = "which queue?", ["This one.", "", "Another, and much longer, one."]
    (answer,) = reranker.infer([{"query": query, "documents": documents}])
    model = cross_encoder(folder)
    expected = model.predict([(query, document) for document in documents])
    np.testing.assert_allclose(answer["scores"], expected, atol=1e-5)
    assert all(0 < score < 1 for score in answer["scores"])


@pytest.mark.parametrize("where", ["older", "newer"])
def test_a_reranker_has_the_checkpoints_activation(
    where: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = save_encoder("bert", tmp_path, labels=1)
    config = json.loads((folder / "config.json").read_text())
    identity = "torch.nn.modules.linear.Identity"
    if where == "older":
        config["sbert_ce_default_activation_function"] = identity
    else:
        config["sentence_transformers"] = {"activation_fn": identity}
    (folder / "config.json").write_text(json.dumps(config))
    plain, sigmoid = Reranker(folder, device="cpu"), Reranker(checkpoint("bert", 1), device="cpu")
    plain.load()
    sigmoid.load()
    item = {"query": "a", "documents": ["b", "c"]}
    logits = plain.infer([item])[0]["scores"]
    expected = [1 / (1 + math.exp(-logit)) for logit in logits]
    assert sigmoid.infer([item])[0]["scores"] == pytest.approx(expected, abs=1e-6)


def test_a_reranker_refuses_what_is_too_long_unless_it_may_cut(
    checkpoint: Callable[..., Path],
) -> None:
    folder = checkpoint("bert", 1)
    reranker = Reranker(folder, device="cpu")
    reranker.load()
    item = {"query": "q", "documents": ["short", "long " * 30]}
    refused, cut = reranker.infer([item, {**item, "truncate": True}])
    assert isinstance(refused, InvalidRequest)
    assert refused.field == "documents[1]"
    model = cross_encoder(folder)
    expected = model.predict([("q", document) for document in item["documents"]])
    np.testing.assert_allclose(cut["scores"], expected, atol=1e-5)
    for bad in (
        {"query": 1, "documents": ["a"]},
        {"query": "a", "documents": [[1]]},
        {"query": "a"},
    ):
        assert isinstance(reranker.infer([bad])[0], InvalidRequest)


@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification"])
def test_a_classifier_gives_the_models_probabilities(problem: str, tmp_path: Path) -> None:
    labels = {0: "no", 1: "maybe", 2: "yes"}
    folder = save_encoder("bert", tmp_path, labels=3, problem_type=problem, id2label=labels)
    classifier = Classifier(folder, device="cpu")
    classifier.load()
    texts: list[Any] = ["one", "two and more", ["a premise", "a hypothesis"]]
    (answer,) = classifier.infer([{"input": texts}])
    assert answer["labels"] == ["no", "maybe", "yes"]
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = encoder_tokenizer("bert")
    for text, probs in zip(texts, answer["probs"], strict=True):
        pair = (text,) if isinstance(text, str) else text
        with torch.inference_mode():
            logits = model(**tokenizer(*pair, return_tensors="pt")).logits[0]
        several = problem.startswith("multi")
        expected = logits.sigmoid() if several else logits.softmax(-1)
        assert probs == pytest.approx(expected.tolist(), abs=1e-5)


def test_kinds_are_recognised_by_the_files(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    assert checkpoint_kind(checkpoint("bert")) is ModelKind.EMBED
    assert checkpoint_kind(checkpoint("bert", 1)) is ModelKind.RERANK
    assert checkpoint_kind(checkpoint("bert", 3)) is ModelKind.CLASSIFY
    folder = save_encoder("qwen3", tmp_path)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("Qwen3Model", "Qwen3ForCausalLM"))
    assert checkpoint_kind(folder) is ModelKind.GENERATE
    assert checkpoint_kind(save_modules(folder, "lasttoken")) is ModelKind.EMBED
    for name, kind in (
        ("BertForMaskedLM", ModelKind.EMBED),
        ("GPT2LMHeadModel", ModelKind.GENERATE),
    ):
        (tmp_path / "modules.json").unlink(missing_ok=True)
        config.write_text(json.dumps({"architectures": [name]}))
        assert checkpoint_kind(folder) is kind


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("modules.json", "{", "malformed"),
        ("modules.json", "{}", "a list of modules"),
        ("modules.json", '[{"path": "../x", "type": "a.Transformer"}]', "inside the checkpoint"),
        ("modules.json", '[{"path": "", "type": "a.Router"}]', "Router"),
        (
            "modules.json",
            '[{"path": "0_T", "type": "a.Transformer"}, {"type": "a.Pooling"}]',
            "own folder",
        ),
        ("1_Pooling/config.json", '{"pooling_mode": "median"}', "'median'"),
        ("1_Pooling/config.json", "[]", "a JSON object"),
        ("sentence_bert_config.json", '{"transformer_task": "fill-mask"}', "'fill-mask'"),
        ("sentence_bert_config.json", '{"config_kwargs": {"num_layers": 1}}', "num_layers"),
        ("config_sentence_transformers.json", '{"prompts": []}', "an object as prompts"),
    ],
)
def test_what_is_not_known_is_refused(
    file: str, content: str, says: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint("bert") / "config.json").read_bytes())
    save_modules(tmp_path, "mean")
    (tmp_path / file).write_text(content)
    with pytest.raises(ModelError, match=says):
        read_recipe(tmp_path)


def test_a_model_that_reads_its_padding_is_refused(tmp_path: Path) -> None:
    folder = save_encoder("bert", tmp_path)
    embedder = loaded(folder)
    forward = embedder.encoder.model.forward
    embedder.encoder.model.forward = lambda attention_mask, **inputs: forward(**inputs)
    with pytest.raises(UnsupportedModel, match="silently wrong"):
        embedder.encoder.check()


def test_what_is_no_number_is_an_error_of_its_item(
    bert: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(rows: Any, works: Any) -> torch.Tensor:
        values = torch.zeros(len(rows), WIDTH)
        values[1] = torch.inf
        return values

    monkeypatch.setattr(bert, "_compute", broken)
    fine, wrong = bert.infer([{"input": ["a"]}, {"input": ["b"]}])
    assert not isinstance(fine, ModelError)
    assert isinstance(wrong, ModelError)


def test_length_groups_hold_every_row_once_within_the_bound() -> None:
    generator = np.random.default_rng(5)
    for _ in range(50):
        lengths = generator.integers(1, 60, generator.integers(1, 80)).tolist()
        groups = length_groups(lengths, max_tokens=200)
        assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
        for group in groups:
            assert len(group) * max(lengths[index] for index in group) <= 200 or len(group) == 1
        cost = sum(32 + len(group) * max(lengths[i] for i in group) for group in groups)
        assert cost <= sum(32 + length for length in lengths)
    assert length_groups([], 100) == []
    assert length_groups([500], 100) == [[0]]


def test_length_groups_divide_where_padding_costs_more_than_a_pass() -> None:
    assert sorted(map(sorted, length_groups([10, 11, 10, 200, 201], 10_000))) == [[0, 1, 2], [3, 4]]
    assert length_groups([10, 12, 11], 10_000) == [[1, 2, 0]]


def test_numbers_are_little_endian_float32(bert: Embedder) -> None:
    (answer,) = bert.infer([{"input": ["a"]}])
    numbers = struct.unpack(f"<{WIDTH}f", answer["embeddings"][0])
    assert numbers == pytest.approx(vectors(answer)[0].tolist())
