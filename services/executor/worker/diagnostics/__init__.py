"""What a rank tells whoever looks into it: stacks, state, profiles."""
