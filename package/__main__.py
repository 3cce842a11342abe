"""`python -m posttrainllm` is the `posttrainllm` command."""

import sys

from .cli.main import main

sys.exit(main())
