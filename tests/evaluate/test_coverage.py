import json
from dataclasses import asdict
from pathlib import Path

import pytest

from classlens.errors import ModelError
from classlens.evaluate import coverage
from classlens.evaluate.coverage import Row, cover, examine, network_names, read_rows, table
from classlens.models import untrained

GOOD = Row("a", 128, True, True, 1e-7, 1e-6, True, True, 5.0)


def test_names_of_both_libraries() -> None:
    names = network_names("torchvision")
    assert len(names) == 80
    assert "torchvision:resnet50" in names
    families = network_names("timm")
    assert len(families) > 80
    assert all(name.startswith("timm:") for name in families)
    with pytest.raises(ModelError, match="there are torchvision, timm, transformers"):
        network_names("keras")


def test_every_classifier_of_transformers_with_both_implementations_of_attention() -> None:
    names = network_names("transformers")
    assert len(names) > 55
    assert "transformers:ViTForImageClassification eager" in names
    assert "transformers:ViTForImageClassification sdpa" in names
    assert "transformers:ResNetForImageClassification eager" in names
    assert "transformers:ResNetForImageClassification sdpa" not in names


def test_a_transformer_is_built_with_the_attention_of_its_name() -> None:
    for attention in ("eager", "sdpa"):
        model, side = untrained.build(f"transformers:ViTMSNForImageClassification {attention}")
        assert (model.config._attn_implementation, side, model.training) == (attention, 224, False)
        assert len(model.vit.encoder.layer if hasattr(model.vit, "encoder") else model.vit.layers) == 2


def test_a_small_network_of_transformers() -> None:
    row = examine("transformers:MobileNetV2ForImageClassification eager")
    assert row.good, row
    assert row.size == 224


@pytest.mark.parametrize(("name", "why"), [
    ("ImageGPTForImageClassification eager", "it reads input_ids, not images alone"),
    ("ViTForImageClassification flash", "no classifier 'ViTForImageClassification flash'"),
    ("BertModel eager", "no classifier 'BertModel eager'"),
])  # fmt: skip
def test_networks_that_are_refused(name: str, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        untrained.build(f"transformers:{name}")


def test_a_network_that_works() -> None:
    row = examine("torchvision:squeezenet1_1")
    assert row.good
    assert row.size == 128
    assert row.times_forward is not None
    assert row.times_forward > 1


def test_what_makes_a_row_good() -> None:
    assert GOOD.good
    for change in ({"captured": False}, {"finite": False}, {"conservation": 0.1}, {"conservation": None},
                   {"batch_is_single": False}, {"untouched": False}):  # fmt: skip
        assert not Row(**(asdict(GOOD) | change)).good


def test_a_run_goes_on_where_it_was_and_names_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "network_names", lambda library: ["a", "no-such-network", "c"])
    log = tmp_path / "rows.jsonl"
    log.write_text(json.dumps(asdict(GOOD)) + "\n" + '{"name": "c", "si')  # the second line was cut by a kill
    assert read_rows(log) == [GOOD]
    log.write_text(json.dumps(asdict(GOOD)) + "\n")
    rows = [row for _, _, row in cover("torchvision", tmp_path, timeout=900, only="a")]
    assert rows == [GOOD]
    failed = [row for _, _, row in cover("torchvision", tmp_path, timeout=900, only="no-such")]
    assert "no-such-network" in failed[0].reason
    assert not failed[0].good
    assert read_rows(log) == [GOOD, *failed]


def test_a_network_that_takes_too_long() -> None:
    assert coverage._in_a_process("torchvision:vgg11", timeout=0.05, memory=8).reason == "took longer than 0 s"


def test_table_counts_and_says_why() -> None:
    text = table([GOOD, Row("b", reason="no rule for fft")])
    assert text.startswith("1 of 2 networks")
    assert "| b | 0 | **no** | **no** | – | – | **no** | **no** | – | no rule for fft |" in text
