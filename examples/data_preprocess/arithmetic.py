"""Easy word problems to parquet; see `--help` and docs/examples/gsm8k_example.md."""

from verl.data.preprocess.arithmetic import main

if __name__ == "__main__":
    raise SystemExit(main())
