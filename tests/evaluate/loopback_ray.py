"""`ray start ...` that stays on this machine: Ray turns 127.0.0.1 into an address that others can reach."""

import sys

from ray._private import services
from ray.scripts.scripts import main

services.get_node_ip_address = lambda address=None: "127.0.0.1"
sys.exit(main())
