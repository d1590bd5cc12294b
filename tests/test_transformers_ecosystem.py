"""What users do with a model of transformers, done with a patched one: saving, tying, quantising, offloading, PEFT."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ranks
from support.transformers_models import outputs, tiny, words
from torch import nn

import stiefel_geo
from stiefel_geo.integrations import transformers_attention

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' and torchao's own


def difference(model: nn.Module, other: nn.Module, family: str) -> float:
    return float((outputs(model, family) - outputs(other, family)).abs().max())


@pytest.mark.parametrize("family", ["gpt2", "t5", "vit"])
def test_a_model_saved_inside_unpatched_is_loaded_by_from_pretrained(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    stiefel_geo.patch(model)
    with stiefel_geo.unpatched(model):
        model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert difference(loaded, model, family) < 1e-10
    stiefel_geo.patch(loaded)
    assert difference(loaded, model, family) < 1e-10


def test_save_pretrained_takes_the_plain_state_dict_of_a_model_in_training(tmp_path: Path) -> None:
    model = tiny("llama")
    stiefel_geo.patch(model)
    model.save_pretrained(tmp_path, state_dict=stiefel_geo.plain_state_dict(model))
    loaded, found = type(model).from_pretrained(tmp_path, dtype=torch.float64, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    assert difference(loaded.eval(), model, "llama") < 1e-10


def test_a_plain_state_dict_of_transformers_loads_into_a_patched_conv1d() -> None:
    plain, patched = tiny("gpt2"), tiny("gpt2")
    for p in patched.parameters():
        p.data.mul_(0.5)
    stiefel_geo.patch(patched)
    patched.load_state_dict(plain.state_dict())
    assert difference(patched, plain, "gpt2") < 1e-10


def test_tied_embeddings_stay_tied() -> None:
    model = tiny("gpt2")
    stiefel_geo.patch(model)
    model.tie_weights()
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradient_checkpointing_gives_the_same_gradients(family: str) -> None:
    model = tiny(family, use_cache=False).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    stiefel_geo.patch(model)
    plain = gradients(model)
    model.gradient_checkpointing_enable()
    assert min(float(g.abs().max()) for g in plain) > 0
    assert all(torch.equal(g, h) for g, h in zip(plain, gradients(model), strict=True))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(**words(), labels=words()["input_ids"]).loss.backward()
    return [frames.grad.clone() for _, frames in stiefel_geo.frames(model)]


def test_quantised_layers_are_refused_and_left_alone() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = tiny("llama").float()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    with pytest.raises(ValueError, match="holds its weight as Int8Tensor; patch before quantising"):
        stiefel_geo.patch(model)


def test_an_offloaded_model_is_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = tiny("llama").float()
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="is offloaded: its weight is there in its forward alone"):
        stiefel_geo.patch(model)


def test_a_partitioned_weight_is_refused() -> None:
    """ZeRO-3 leaves an empty tensor in the place of each weight."""
    model = tiny("llama")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = torch.empty(0)
    with pytest.raises(ValueError, match=r"holds no whole weight but shape \(0,\); use fully_shard, not ZeRO-3"):
        stiefel_geo.patch(model)


def test_a_dispatched_model_is_patched_under_accelerates_hooks(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, plain = tiny("llama"), tiny("llama")
    accelerate.dispatch_model(model, device_map={"": "cpu"}, force_hooks=True)
    stiefel_geo.patch(model)
    assert difference(model, plain, "llama") < 1e-10
    plain.save_pretrained(tmp_path)
    mapped = type(plain).from_pretrained(tmp_path, dtype=torch.float64, device_map="cpu").eval()
    stiefel_geo.patch(mapped)
    assert difference(mapped, plain, "llama") < 1e-10


def test_peft_adapters_on_values_and_mlp_leave_the_frames_their_names_and_values() -> None:
    peft = pytest.importorskip("peft")
    model, plain = tiny("llama"), tiny("llama")
    stiefel_geo.patch(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["v_proj", "up_proj", "down_proj"], r=2))
    assert difference(adapted, plain, "llama") < 1e-10
    assert [name for name, _ in stiefel_geo.frames(adapted)] == [
        f"base_model.model.{name}" for name, _ in stiefel_geo.frames(model)
    ]
    merged = adapted.merge_and_unload()
    stiefel_geo.unpatch(merged)
    assert list(merged.state_dict()) == list(plain.state_dict())


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank measured under accelerate's FSDP2."""
    pytest.importorskip("accelerate", minversion="1.6", reason="FSDP2 came with accelerate 1.6")
    module = importlib.import_module("support.accelerate_fsdp2")
    return ranks.measured(module.main, tmp_path_factory.mktemp("fsdp2"))


def test_frames_train_under_accelerates_fsdp2_as_in_one_process(sharded: list[dict[str, Any]]) -> None:
    module = importlib.import_module("support.accelerate_fsdp2")
    model = tiny("llama").train()
    stiefel_geo.patch(model)
    alone = module.steps(model, module.optimizer_of(model), module.STEPS)
    for rank in sharded:
        assert rank["losses"] == pytest.approx(alone, abs=1e-10)
        assert set(rank["sharded"]) == {"DTensor"}
        assert rank["defect"] < 1e-12


def test_accelerates_fsdp2_state_loads_and_goes_on_as_before(sharded: list[dict[str, Any]]) -> None:
    assert all(rank["again"] == rank["more"] for rank in sharded)
    assert all(rank["more"][0] < rank["losses"][-1] for rank in sharded)


def test_trainer_resumes_a_patched_model_bit_for_bit(tmp_path: Path) -> None:
    def trained(resumed: str | None) -> nn.Module:
        model: nn.Module = tiny("llama").train()
        for p in model.parameters() if resumed else ():
            p.data.mul_(0.5)  # so that a checkpoint that is not read would show
        stiefel_geo.patch(model)
        optimizer = stiefel_geo.ScaleFreeRiemannianAdam(stiefel_geo.param_groups(model, 0.01), lr=3e-3)
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=6, save_steps=3, per_device_train_batch_size=2, use_cpu=True, report_to=[], seed=0
        )
        data = [{"input_ids": row, "labels": row} for row in torch.arange(3, 51).view(8, 6)]
        transformers.Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None)).train(resumed)
        return model

    whole, resumed = trained(None).state_dict(), trained(str(tmp_path / "checkpoint-3")).state_dict()
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    assert not torch.equal(whole["lm_head.weight"], tiny("llama").lm_head.weight)


@pytest.mark.parametrize("family", ["llama", "bert", "gpt2", "vit", "t5", "swinv2"])
def test_groups_decay_what_trainer_decays(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    decayed = set(transformers.Trainer(model, arguments).get_decay_parameter_names(model))
    groups = {group["name"]: group for group in stiefel_geo.param_groups(model, 0.1)}
    ours = {id(p) for p in groups["decayed"]["params"]}
    names = {name for name, _ in model.named_parameters()}  # Trainer lists a tied weight under each of its names
    assert {name for name, p in model.named_parameters() if id(p) in ours} == decayed & names


def test_every_row_of_the_table_names_a_class_of_the_installed_transformers() -> None:
    missing = []
    for name in transformers_attention.TABLE:
        path, _, cls = transformers_attention.qualified(name).removeprefix("transformers.models.").rpartition(".")
        folder, _, file = path.partition(".")
        source = Path(transformers.models.__path__[0], folder, f"{file}.py")
        if not source.exists() or f"class {cls}(" not in source.read_text(encoding="utf-8"):
            missing.append(name)
    assert missing == []


def test_the_example_with_trainer_and_peft_runs(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    pytest.importorskip("peft")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    assert importlib.import_module("train_transformers").main(["--smoke"]) == 0
    printed = capsys.readouterr().out
    assert "patched 2 attention modules, 16 frames" in printed
    assert float(printed.split("largest defect ")[1].split()[0]) < 1e-5
