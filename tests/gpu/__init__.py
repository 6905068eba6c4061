"""What only a GPU can show: `make test-gpu` on a machine that has one."""
