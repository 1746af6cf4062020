"""An extra that is missing is named with a command that installs it, wherever the program lies."""

import pytest

from data_pipeline.base import extras
from data_pipeline.base.errors import UsageError
from data_pipeline.base.extras import install_command, load_package, require_package


def test_the_command_installs_the_checkout_or_the_package(tmp_path, monkeypatch):
    checkout = tmp_path / "a checkout"
    checkout.mkdir()
    monkeypatch.setattr(extras, "_ROOT", checkout)
    assert install_command("chat") == "pip install 'maxtrain[chat]'"
    (checkout / "pyproject.toml").touch()
    assert install_command("chat") == f"pip install -e '{checkout}[chat]'"
    monkeypatch.chdir(checkout)
    assert install_command("chat") == "pip install -e '.[chat]'"


@pytest.mark.parametrize("call", [load_package, require_package])
def test_a_package_that_is_missing_is_named_with_its_command(call):
    with pytest.raises(UsageError, match="no_such_package") as caught:
        call("no_such_package", "chat", "--chat")
    assert str(caught.value).endswith(f"Install it: {install_command('chat')}")
