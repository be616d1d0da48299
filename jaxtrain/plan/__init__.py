"""Which mesh, and will it fit: answered from the traced step and data sheets, and checked by the real compiler."""
