"""The demo's models and prompts: found, cached, always the same, and clear when something is missing."""

import importlib.metadata as metadata
import sys
from types import SimpleNamespace

import pytest

from vllm_adaptivespec.cli import models, prompts


@pytest.fixture
def package(monkeypatch, tmp_path):
    monkeypatch.setenv("ADAPTIVESPEC_CACHE", str(tmp_path))
    found = SimpleNamespace(version="1.2", locate_file=lambda name: tmp_path / name)
    monkeypatch.setattr(models.metadata, "distribution", lambda name: found)


def test_target_is_converted_once(package, monkeypatch, tmp_path):
    conversions = []

    def convert(gguf, target):
        conversions.append(gguf)
        target.mkdir()

    monkeypatch.setattr(models, "convert_gguf", convert)
    assert models.demo_target() == models.demo_target() == tmp_path / "smollm2-135m-instruct-1.2"
    assert conversions == [tmp_path / models.GGUF]


def fake_transformers(monkeypatch, save):
    """Stand-ins for the libraries of the conversion: importing them takes longer than all other tests here."""
    tokenizer = SimpleNamespace(chat_template="{{ messages }}", save_pretrained=lambda folder: None)
    model = SimpleNamespace(save_pretrained=save)
    libraries = {
        "torch": SimpleNamespace(bfloat16="bfloat16"),
        "transformers": SimpleNamespace(
            AutoTokenizer=SimpleNamespace(from_pretrained=lambda **source: tokenizer),
            AutoModelForCausalLM=SimpleNamespace(from_pretrained=lambda **source: model),
            GgufConfig=lambda dequantize: None,
        ),
    }
    for name, library in libraries.items():
        monkeypatch.setitem(sys.modules, name, library)


def test_conversion_appears_whole(monkeypatch, tmp_path):
    target = tmp_path / "cache" / "model"

    def save(folder):
        assert not target.exists()
        (folder / "model.safetensors").touch()

    fake_transformers(monkeypatch, save)
    models.convert_gguf(tmp_path / "model.gguf", target)
    assert [path.name for path in target.iterdir()] == ["model.safetensors"]
    assert list(target.parent.iterdir()) == [target]


def test_interrupted_conversion_leaves_nothing(monkeypatch, tmp_path):
    def save(folder):
        (folder / "model.safetensors").touch()
        raise KeyboardInterrupt

    fake_transformers(monkeypatch, save)
    with pytest.raises(KeyboardInterrupt):
        models.convert_gguf(tmp_path / "model.gguf", tmp_path / "cache" / "model")
    assert not list((tmp_path / "cache").iterdir())


def test_conversion_done_by_another_process_is_taken(monkeypatch, tmp_path):
    target = tmp_path / "cache" / "model"

    def save(folder):
        (folder / "model.safetensors").touch()
        target.mkdir()
        (target / "theirs").touch()

    fake_transformers(monkeypatch, save)
    models.convert_gguf(tmp_path / "model.gguf", target)
    assert [path.name for path in target.iterdir()] == ["theirs"]
    assert list(target.parent.iterdir()) == [target]


def test_missing_package_says_what_to_do(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(models.metadata, "distribution", missing)
    with pytest.raises(FileNotFoundError, match="make env"):
        models.demo_target()


def test_head_outside_a_checkout_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(models, "HEAD", tmp_path)
    with pytest.raises(FileNotFoundError, match="run from a checkout"):
        models.demo_head()


def test_head_is_in_the_checkout():
    assert (models.demo_head() / "config.json").is_file()


def test_prompts_are_real_and_the_same_every_time():
    mixed = prompts.mixed_prompts(20)
    assert mixed == prompts.mixed_prompts(20)
    assert len({prompt.text for prompt in mixed}) == 20
    assert [prompt.source for prompt in mixed] == ["humaneval", "chat"] * 10
    assert all("def " in prompt.text for prompt in mixed if prompt.source == "humaneval")


def test_odd_numbers_of_prompts():
    assert [prompt.source for prompt in prompts.mixed_prompts(3)] == ["humaneval", "chat", "humaneval"]
    with pytest.raises(ValueError, match="at least 2"):
        prompts.mixed_prompts(1)


def test_prompts_are_spread_over_their_set():
    texts = [prompt.text for prompt in prompts.chat_prompts()]
    chosen = [texts.index(prompt.text) for prompt in prompts.load_prompts("chat", 4)]
    assert chosen == [0, 15, 30, 45]
    assert len(prompts.load_prompts("humaneval", 164)) == 164
    with pytest.raises(ValueError, match="60 prompts"):
        prompts.load_prompts("chat", 61)
