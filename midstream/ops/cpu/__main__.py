"""Build the kernels now, so that the first start does not."""

from midstream.ops.cpu import library

if __name__ == "__main__":
    lib = library()
    print(f"kernels: {lib._name if lib is not None else 'reference (plain torch)'}")
