"""Choose a mesh and predict whether a run fits, from the traced step and data sheets, checked by the real compiler."""
