"""A LoRA adapter's folder: what is refused when it is loaded, and that its digest is of what is loaded."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import BadModel
from engine.adapter import load_adapter
from engine.adapter_config import CONFIG_FILE, TENSOR_FILE, AdapterConfig
from engine.digest import adapter_digest
from engine.model_config import ModelConfig
from tests.engine.random_adapters import write_adapter


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "IA3"),
        ("bias", "all"),
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 8}),
        ("alpha_pattern", {"q_proj": 8}),
        ("layers_to_transform", [0]),
        ("fan_in_fan_out", True),
        ("lora_bias", True),
        ("init_lora_weights", "pissa"),
        ("trainable_token_indices", [3]),
        ("a_key_of_tomorrow", 1),
        ("r", 0),
        ("r", True),
        ("r", None),
        ("lora_alpha", "16"),
        ("lora_alpha", float("nan")),
        ("lora_alpha", 10**400),
        ("use_rslora", "yes"),
        ("target_modules", []),
        ("target_modules", "all-linear"),
        ("target_modules", ["q_proj", "lm_head"]),
        ("target_modules", ["q_proj", ["v_proj"]]),
    ],
)
def test_a_config_that_asks_for_more_is_refused_by_its_key(
    tiny_folder: Path, key: str, value: object, tmp_path: Path
) -> None:
    quiet = {"use_dora": False, "modules_to_save": None, "rank_pattern": {}, "peft_version": "0.18.0"}
    folder = write_adapter(tmp_path, tiny_folder, **quiet)
    assert AdapterConfig.load(folder).rank == 4
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(config | {key: value}))
    with pytest.raises(BadModel, match=rf"{CONFIG_FILE}: {key}: "):
        AdapterConfig.load(folder)


def test_other_tensors_are_refused_by_name(tiny_folder: Path, tmp_path: Path) -> None:
    config = ModelConfig.load(tiny_folder)
    folder = write_adapter(tmp_path, tiny_folder, ("q_proj",))
    load_adapter(folder, config, torch.float32)
    intact = load_file(folder / TENSOR_FILE)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"

    def refused(tensors: dict[str, torch.Tensor], words: str) -> None:
        save_file(tensors, folder / TENSOR_FILE)
        with pytest.raises(BadModel, match=words):
            load_adapter(folder, config, torch.float32)

    refused({key: tensor for key, tensor in intact.items() if key != name}, f"missing tensor {name}")
    refused(intact | {name.replace("q_proj", "k_proj"): torch.zeros(32, 4)}, "unexpected tensor .*k_proj")
    refused(intact | {name: torch.zeros(96, 8)}, rf"{name} has shape \[96, 8\], the base model with {CONFIG_FILE} asks")
    refused(intact | {name: torch.full((96, 4), torch.nan)}, f"{name} holds NaN")
    refused(intact | {name: torch.zeros(96, 4, dtype=torch.int8)}, f"{name} has dtype I8")
    large = intact | {name: torch.full((96, 4), 3.4e38)}  # with the scale
    refused(large, r"layer 1: too large for torch\.float32")
    edge = torch.finfo(torch.float32).max  # finite, but not when bfloat16 rounds it
    save_file(intact | {name.replace("lora_B", "lora_A"): torch.full((4, 96), edge)}, folder / TENSOR_FILE)
    load_adapter(folder, config, torch.float32)
    with pytest.raises(BadModel, match=r"layer 1: too large for torch\.bfloat16"):
        load_adapter(folder, config, torch.bfloat16)
    save_file(intact, folder / TENSOR_FILE)
    load_adapter(folder, config, torch.float32)
    (folder / TENSOR_FILE).unlink()
    with pytest.raises(BadModel, match=f"{TENSOR_FILE}: cannot be read"):
        load_adapter(folder, config, torch.float32)


def test_the_digest_is_of_content(tiny_folder: Path, tmp_path: Path) -> None:
    digests = [
        adapter_digest(write_adapter(tmp_path / str(index), tiny_folder, **how))
        for index, how in enumerate([{}, {}, {"seed": 1}, {"lora_alpha": 3}])
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_the_digest_is_of_what_is_loaded(tiny_folder: Path, tmp_path: Path) -> None:
    """Else one adapter's KV would be found by another one's requests: no time, cache or index may hide content."""
    first, other = (write_adapter(tmp_path / str(seed), tiny_folder, seed=seed) for seed in range(2))
    config, file = ModelConfig.load(tiny_folder), first / TENSOR_FILE
    before, times_ns = adapter_digest(first), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    shutil.copyfile(other / TENSOR_FILE, file)
    os.utime(file, ns=times_ns)
    assert adapter_digest(first) == adapter_digest(other) != before
    third = write_adapter(tmp_path / "2", tiny_folder, seed=2)
    weight_map = dict.fromkeys(load_file(file), f"../1/{TENSOR_FILE}")
    (third / f"{TENSOR_FILE}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    loaded = [load_adapter(folder, config, torch.float32)[0].qkv for folder in (other, third)]
    assert adapter_digest(third) != adapter_digest(other)
    assert loaded[0] and loaded[1] and not torch.equal(loaded[0].expand, loaded[1].expand)
