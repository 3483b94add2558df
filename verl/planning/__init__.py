"""What a model needs of GPU memory, and a layout that gives it: `verl plan`. Needs no GPU and no weights."""
