import pytest

from launch.demo.once import make_once
from shared.errors import ConfigError


def test_an_interrupted_run_leaves_nothing_that_could_be_taken_for_complete(tmp_path):
    def interrupted(folder):
        (folder / "half").write_text("")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_once(tmp_path / "out", {"seed": 1}, interrupted)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_the_user_is_never_taken_over(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="was not made by this command"):
        make_once(tmp_path, {"seed": 1}, lambda folder: None)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_what_exists_is_not_made_again_and_refused_where_its_settings_were_others(tmp_path):
    folders = []
    settings = {"seed": 1, "train": 40, "val": 12}
    assert make_once(tmp_path / "out", settings, folders.append)
    assert not make_once(tmp_path / "out", settings, folders.append)
    changed = {"seed": 2, "train": 41, "val": 12, "geometry": "mixed"}
    with pytest.raises(ConfigError, match="was made from another geometry, seed, train; remove it"):
        make_once(tmp_path / "out", changed, folders.append)
    assert len(folders) == 1
