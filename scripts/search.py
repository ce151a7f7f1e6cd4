"""Search a space: `python scripts/search.py search_spaces/gpt3_175b_h800.toml [options of echo-explore search]`.

Made to be submitted: `ray job submit --working-dir . -- python scripts/search.py search_spaces/gpt3_175b_h800.toml`.
The same as the command `echo-explore search`; it runs from a checkout or a job's copy of one, installed or not.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from echo_explore.cli.main import main

if __name__ == "__main__":
    sys.argv.insert(1, "search")
    main()
