"""Stand-ins of packages that SGLang imports and an engine of text models does not call.

Python runs this file as `sitecustomize`. Only a package that is not installed has a stand-in, whose
names are all there and do nothing; a tensor is refused by all of them, as that would be a kernel
that is not here. `sgl_kernel` tries FlashInfer's norms first and has operators of its own where
there are none: of those there is no stand-in. SGLang's sampler imports FlashInfer's on any GPU, and
`sgl_kernel` takes the same: so engines need `sampling_backend="pytorch"`, or greedy requests. What
captures drafts imports DeepGEMM, which `unpack_sglang.sh` has SGLang not use.
"""

import importlib.abc
import importlib.machinery
import sys
import types

ABSENT = ("IPython", "deep_gemm", "flashinfer", "gguf", "sentencepiece", "torchvision")
TRIED = ("flashinfer.norm",)


class Nothing:
    """Anything: a function, a decorator, a base class, a type."""

    def __init__(self, name):
        self.__name = name

    def __call__(self, *given, **named):
        torch = sys.modules.get("torch")
        if torch and any(isinstance(x, torch.Tensor) for x in (*given, *named.values())):
            raise RuntimeError(f"{self.__name} was called, of which there is a stand-in alone")
        alone = len(given) == 1 and not named and callable(given[0])
        return given[0] if alone else Nothing(f"{self.__name}()")

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(f"{self.__name}.{name}")

    def __getitem__(self, key):
        return Nothing(f"{self.__name}[..]")

    def __mro_entries__(self, bases):
        return (object,)

    def __or__(self, other):
        return other

    __ror__ = __or__


class StandIn(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last, when no other finder has the package."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT and name not in TRIED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = StandIn(spec.name)
        module.__version__ = "0"
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(Finder())
