"""The ALMA protocol shared by the language-model and the vision half (imports no torch)."""
