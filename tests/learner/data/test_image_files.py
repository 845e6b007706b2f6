"""An image that the learner could not decode is found before the start (decision 31, issue 2), and
decoded no more often than it changes.
"""

import hashlib
import io
import os
import struct
from unittest.mock import Mock, call

import pytest
from PIL import Image

from learner.data import kept, samples
from learner.data.samples import fingerprints, header_size, image_size, known_images
from shared.dataset import image_names, load_dataset
from shared.errors import RecordError
from shared.records import ImageFacts, PictureSize, image_facts

FORMATS = ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"]


def turned(orientation: int) -> dict[str, Image.Exif]:
    """Argument of `save` for a file that EXIF turns."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return {"exif": exif}


NAMES = {f"{number}.png" for number in range(8)}


def encoded(image_format: str, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    # Noise, so that nothing compresses to less than half a file.
    Image.effect_noise((40, 30), 90).convert(mode).save(file, format=image_format)
    return file.getvalue()


@pytest.mark.parametrize(
    ("image_format", "mode"),
    [
        *((one, "RGB") for one in FORMATS),
        *(("PNG", mode) for mode in ("1", "L", "P", "RGBA", "I;16")),
    ],
)
def test_an_image_has_its_width_and_height(image_format, mode):
    assert image_size(encoded(image_format, mode)) == PictureSize(40, 30)


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "TIFF", "MPO"])
def test_a_picture_that_exif_turns_has_the_size_that_is_displayed_by_header_and_whole(
    image_format, tmp_path
):
    file = tmp_path / "a"
    Image.effect_noise((40, 30), 90).convert("RGB").save(file, image_format, **turned(6))
    size = PictureSize(30, 40, 6)
    assert (image_size(file.read_bytes()), header_size(file)) == (size, size)
    assert (size.displayed, size.stored) == ((30, 40), (40, 30))


def test_the_pictures_of_usable_rows_that_exif_turns_are_named_also_at_the_next_start(images):
    Image.new("RGB", (8, 8)).save(images / "3.png", **turned(3))
    assert load(images).turned == ("3.png",)
    assert load(images).turned == ("3.png",)
    Image.new("RGB", (8, 8)).save(images / "3.png")
    assert load(images).turned == ()


def test_a_picture_whose_range_no_file_tells_is_refused_before_the_start_with_the_remedy():
    message = r"floating-point numbers .*; save it with 8 or 16 bits per channel"
    with pytest.raises(ValueError, match=message):
        image_size(encoded("TIFF", "F"))


@pytest.mark.parametrize("image_format", FORMATS)
def test_a_file_that_ends_too_early_is_no_image_although_its_header_is_sound(image_format):
    data = encoded(image_format)
    with pytest.raises(ValueError):
        image_size(data[: len(data) // 2])


@pytest.mark.parametrize(
    "data",
    [b"", b"not an image", b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + bytes(17)],
)
def test_what_is_no_image_is_refused_with_a_reason(data):
    with pytest.raises(ValueError) as caught:
        image_size(data)
    assert str(caught.value)


@pytest.fixture
def images(tmp_path, monkeypatch):
    """A data file beside images `0.png` to `7.png` of 8 x 8 pixels; everything about them is kept,
    however quickly it was found.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "QUICK_S", 0.0)
    for number in range(8):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
    row = '{"images": ["%d.png"], "width": 8, "height": 8, "objects": []}\n'
    (tmp_path / "train.jsonl").write_text("".join(row % (number % 8) for number in range(16)))
    return tmp_path


def load(folder):
    file = folder / "train.jsonl"
    return load_dataset(
        file,
        on_bad_row="error",
        sort_objects=True,
        check_images=True,
        image_size=image_size,
        known_images=known_images(file, fingerprints(file, image_names(file))),
    )


@pytest.fixture
def decoded(monkeypatch):
    """Names of the images that are decoded from now on."""
    names = []

    def facts(path, size):
        names.append(path.name)
        return image_facts(path, size)

    monkeypatch.setattr(samples, "image_facts", facts)
    return names


def test_an_image_of_several_rows_is_decoded_once_and_after_that_only_when_it_changes(
    images, decoded
):
    first = load(images)
    assert sorted(decoded) == [f"{number}.png" for number in range(8)]
    assert list(load(images)) == list(first)
    assert len(decoded) == 8
    Image.new("RGB", (8, 8), "white").save(images / "3.png")
    changed = load(images)
    digest = hashlib.sha256((images / "3.png").read_bytes()).hexdigest()
    assert decoded[8:] == ["3.png"]
    assert changed[3].images[0].sha256 == digest != first[3].images[0].sha256
    # The same size in bytes, at another time.
    os.utime(images / "4.png", ns=(1, 1))
    assert list(load(images)) == list(changed)
    assert decoded[9:] == ["4.png"]
    # Another image of the same size, its time set back as archives and `cp -p` do.
    of_before = (images / "5.png").stat()
    (images / "5.png").write_bytes((images / "6.png").read_bytes())
    os.utime(images / "5.png", ns=(of_before.st_atime_ns, of_before.st_mtime_ns))
    assert (images / "5.png").stat().st_size == of_before.st_size
    load(images)
    assert decoded[10:] == ["5.png"]


def test_a_known_image_still_has_to_have_its_row_s_size(images):
    load(images)
    file = images / "train.jsonl"
    wider = '{"images": ["2.png"], "width": 9, "height": 8, "objects": []}\n'
    file.write_text(file.read_text() + wider)
    message = r"train.jsonl:17: images\[0\]: .*2.png is 8 x 8 pixels, the row says 9 x 8"
    with pytest.raises(RecordError, match=message):
        load(images)


def test_what_is_no_image_is_told_as_ever_and_never_kept(images, decoded):
    (images / "5.png").write_bytes((images / "5.png").read_bytes()[:50])
    message = r"train.jsonl:6: images\[0\]: .*5.png is not a readable image"
    for _ in range(2):
        with pytest.raises(RecordError, match=message):
            load(images)
    assert (decoded.count("5.png"), decoded.count("6.png")) == (2, 1)


def test_a_folder_that_cannot_be_written_costs_the_next_start_its_time_and_nothing_else(
    images, decoded, caplog
):
    (images / "cache").write_text("a file")
    assert list(load(images)) == list(load(images))
    assert len(decoded) == 16
    assert "next start decodes all images again" in caplog.text


def test_a_second_s_work_is_not_told_of_and_not_kept(images, monkeypatch):
    monkeypatch.setattr(kept, "QUICK_S", 60.0)
    report = Mock()
    file = images / "train.jsonl"
    assert len(known_images(file, fingerprints(file, NAMES), report)) == 8
    assert not report.called
    assert not (images / "cache").exists()


def test_what_is_no_image_is_left_out_and_how_far_the_check_is_is_told(images):
    (images / "6.png").write_bytes(b"no image")
    (images / "7.png").unlink()
    os.mkfifo(images / "7.png")
    digests = {
        name: hashlib.sha256((images / name).read_bytes()).hexdigest()
        for name in NAMES - {"6.png", "7.png"}
    }
    report = Mock()
    file = images / "train.jsonl"
    assert known_images(file, fingerprints(file, NAMES), report) == {
        name: ImageFacts(digest, 8, 8) for name, digest in digests.items()
    }
    assert report.call_args_list == [call(done, 8) for done in range(1, 9)]
