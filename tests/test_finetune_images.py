"""What examples/finetune.py reads: every kind of image file as it looks, or by name that it does not."""

import tarfile

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from support.example_scripts import batches, image_data, image_files, small_vit
from support.finetune_runs import one_line, run
from support.image_folders import write_images, write_tar
from timm.data.readers import get_img_extensions, set_img_extensions

# timm's tar reader leaves its file to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@pytest.fixture(autouse=True)
def _extensions_of_timm():
    before = get_img_extensions()
    yield
    set_img_extensions(before)


@pytest.fixture
def data(tmp_path):
    for part, count in (("train", 8), ("test", 2)):
        write_images(tmp_path / "data" / part, ("cat", "dog"), count)
    return tmp_path / "data"


def test_folders_and_tars_of_images_are_read(tmp_path):
    write_images(tmp_path / "data" / "train", ("cat", "dog", "owl"), 12)
    write_tar(tmp_path / "data" / "val.tar", ("cat", "dog", "owl"), 4)
    run(tmp_path / "run", "--data", tmp_path / "data", "--arm", "stiefel", "--epochs", 1)
    weights = safetensors.torch.load_file(tmp_path / "run" / "stiefel" / "model.safetensors")
    assert weights["head.weight"].shape == (3, 128)


def test_an_image_that_cannot_be_decoded_is_named(data, tmp_path, capsys):
    (data / "train" / "dog" / "003.png").write_bytes(b"no picture")
    run(tmp_path / "run", "--data", data, "--epochs", 1, expect=2)
    assert "dog/003.png" in capsys.readouterr().err


def test_an_image_of_more_pixels_than_pillow_opens_is_named(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 32 * 32)
    Image.new("RGB", (64, 64)).save(data / "test" / "dog" / "001.png")
    run(tmp_path / "run", "--data", data, "--epochs", 1, "--arm", "adamw", expect=2)
    error = one_line(capsys.readouterr().err)
    assert "dog/001.png is not (Image size (4096 pixels)" in error


@pytest.mark.parametrize("suffix", [".png", ".tiff"])
def test_grey_values_of_16_bits_keep_their_brightness(tmp_path, suffix):
    values = np.arange(0, 65536, 256, dtype=np.uint16).reshape(16, 16)
    Image.fromarray(values).save(tmp_path / f"grey{suffix}")
    with (tmp_path / f"grey{suffix}").open("rb") as file:
        pixels = np.asarray(image_files.decoded(file))
    assert np.array_equal(pixels, np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, axis=2))


def test_grey_values_of_32_bits_are_refused_by_name(data, tmp_path, capsys):
    Image.fromarray(np.ones((32, 32), dtype=np.float32)).save(data / "test" / "dog" / "float.tiff")
    run(tmp_path / "run", "--data", data, "--epochs", 1, "--arm", "adamw", expect=2)
    assert "dog/float.tiff is not (its values are neither of 8 nor of 16 bits" in one_line(capsys.readouterr().err)


def test_webp_beside_png_is_read(data):
    before = len(image_data.load_images(str(data), None, False).train)
    Image.new("RGB", (32, 32), (250, 0, 0)).save(data / "train" / "dog" / "more.WEBP", lossless=True)
    train = image_data.load_images(str(data), None, False).train
    assert len(train) == before + 1
    colours = [image.getpixel((5, 5)) for image, label in (train[i] for i in range(len(train))) if label == 1]
    assert (250, 0, 0) in colours


def test_files_that_are_not_read_are_counted_and_named(data, capsys):
    (data / "train" / "dog" / "a.heic").write_bytes(b"")
    (data / "train" / "cat" / "b.HEIC").write_bytes(b"")
    (data / "train" / "cat" / "Thumbs").write_bytes(b"")
    image_data.load_images(str(data), None, False)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{data / 'train'}: not read, as no images by their names: 2 × .heic, 1 × Thumbs")


def test_files_in_a_tar_that_are_not_read_are_named_too(data, tmp_path, capsys):
    (data / "test" / "dog" / "a.heic").write_bytes(b"")
    with tarfile.open(data / "validation.tar", "w") as tar:
        tar.add(data / "test", arcname=".")
    (data / "test").rename(tmp_path / "elsewhere")
    image_data.load_images(str(data), None, False)
    assert "validation.tar: not read, as no images by their names: 1 × .heic" in capsys.readouterr().out


def loaded(seed, epoch, **options):
    images = image_data.Images(image_data.digits().train, [], classes=10, mirror=True)
    train, _ = batches.prepare(images, small_vit.small_vit(10), 32, (64, 32))
    return torch.cat([pixels for pixels, _ in batches.shuffled(train, 16, seed, epoch, options)])


def test_batches_follow_from_seed_and_epoch_alone():
    first = loaded(0, 1)
    assert torch.equal(first, loaded(0, 1))
    assert not torch.equal(first, loaded(0, 2))
    assert not torch.equal(first, loaded(1, 1))


@pytest.mark.forks
def test_batches_are_the_same_whatever_processes_load_them():
    assert torch.equal(loaded(0, 1), loaded(0, 1, num_workers=2))


def test_loading_an_image_leaves_the_generators_of_dropout_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    drawn = batches.Drawn([torch.ones(1)] * 3, key=7)
    torch.manual_seed(3)
    assert drawn[2] == 1
    assert torch.equal(torch.rand(4), expected)
