"""The Switch layer: `layer` composes a router, a dispatcher and the experts; `growth` splits
experts.

Names of tensors end in their shape, a letter for each dimension:

    B batch    T time       S tokens, B * T in batch-major order
    D model    F hidden     I, O inputs and outputs of a linear map
    E experts  C capacity   R rows of the experts' input
    V vocabulary            W processes  N ensemble members
"""
