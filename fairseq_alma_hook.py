"""Registers the plug-in when fairseq is imported: `--task alma_lm` works without `--user-dir`.

fairseq has no entry points. `fairseq_alma.pth` calls `install` at every start of Python, so this
module imports only `sys`, and processes that never import fairseq pay for one more finder.
"""

import sys


class _Finder:
    """A finder for sys.meta_path that imports the plug-in once the module fairseq is complete.

    The other finders locate fairseq; this one wraps the loader that they return. Importing the
    plug-in along with `fairseq.options` would be too early: fairseq.tasks and fairseq.models are
    only half imported then.
    """

    def find_spec(self, name, path=None, target=None):
        """The spec of fairseq with a loader that also imports the plug-in; None for all others."""
        if name != "fairseq":
            return None
        specs = (
            finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self
        )
        spec = next(filter(None, specs), None)
        if spec and hasattr(spec.loader, "exec_module"):
            self._extend(spec.loader)
        return spec

    def _extend(self, loader):
        execute = loader.exec_module

        def execute_and_register(module):
            import warnings

            # fairscale, which fairseq imports, uses deprecated names of torch.
            warnings.filterwarnings("ignore", category=FutureWarning, module="fairscale")
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                import fairseq_alma.plugin  # noqa: F401

        loader.exec_module = execute_and_register


def install():
    """Wait for the import of fairseq; a second call does nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
