"""Train what conf/ says: `python train.py --help`."""

import hydraloop

if __name__ == "__main__":
    hydraloop.main()
