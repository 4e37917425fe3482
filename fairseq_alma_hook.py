"""Registers the plug-in with fairseq, so that `fairseq-train --task alma_lm` works without `--user-dir`.

fairseq has no entry points. `fairseq_alma.pth` calls `install` at every start of Python, so this module
imports nothing but `sys`; processes that never import fairseq pay for one more finder and nothing else.
"""

import sys


class _Finder:
    """Lets the other finders find fairseq, and imports the plug-in once fairseq has been executed.

    Not earlier: `fairseq.options` is imported while `fairseq.tasks` and `fairseq.models`, which the plug-in
    needs whole, are half-way through their own import.
    """

    def find_spec(self, name, path=None, target=None):
        """Only fairseq itself is of interest."""
        if name != "fairseq":
            return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, specs), None)
        if spec and hasattr(spec.loader, "exec_module"):
            self._extend(spec.loader)
        return spec

    def _extend(self, loader):
        execute = loader.exec_module

        def execute_and_register(module):
            import warnings

            # fairscale, which fairseq imports, uses names that torch has deprecated; nobody here can mend it.
            warnings.filterwarnings("ignore", category=FutureWarning, module="fairscale")
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                __import__("fairseq_alma.plugin")

        loader.exec_module = execute_and_register


def install():
    """Wait for fairseq; a second call does nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
