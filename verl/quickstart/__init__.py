"""The quick start: a model made from scratch learns arithmetic word problems, on a CPU, in a few minutes."""
