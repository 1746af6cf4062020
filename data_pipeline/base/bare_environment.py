"""The environment variables of a process that runs code or text which this project did not write:
chat templates, reward functions, and what a model wrote.

Only variables on an allow-list are passed on, so that API keys, tokens and passwords of the parent
process are not readable there.
"""

import os
import re
from collections.abc import Iterable, Mapping

# Locations, languages and settings of libraries. None of these holds a secret: proxies, for
# example, are left out, since their URLs may have a password.
_NAMES = frozenset(
    [
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ"),
        *("LANG", "LANGUAGE", "TMPDIR", "TMP", "TEMP", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"),
        *("PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED", "PYTHONUTF8", "PYTHONIOENCODING"),
        *("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONUNBUFFERED", "PYTHONWARNINGS"),
        *("PYTHONNOUSERSITE", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD"),
        *("DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH", "SYSTEMROOT"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
        *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "CUDA_HOME", "ROCR_VISIBLE_DEVICES"),
        *("XLA_FLAGS", "LIBTPU_INIT_ARGS", "TPU_LIBRARY_PATH"),
        *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE"),
        *("HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM", "NLTK_DATA"),
    ]
)
_PATTERN = re.compile(
    r"LC_[A-Z]+|JAX_(?:PLATFORMS|ENABLE_X64|COMPILATION_CACHE_DIR|DEFAULT_MATMUL_PRECISION)"
    r"|(?:OMP|OPENBLAS|MKL|NUMEXPR|VECLIB_MAXIMUM|BLIS)_(?:NUM_)?THREADS"
)


def bare_environment(
    passed: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
    **added: str,
) -> dict[str, str]:
    """Return the environment of a process that must not see the secrets of this one.

    Args:
        passed: names of further variables that are passed on, where they are set.
        environment: what is filtered; None: the environment of this process.
        added: variables that are set, whatever the environment says.
    """
    if environment is None:
        environment = os.environ
    names = frozenset(passed)
    kept = {
        name: value
        for name, value in environment.items()
        if name in _NAMES or name in names or _PATTERN.fullmatch(name)
    }
    return kept | added
