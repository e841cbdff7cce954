import sys
from pathlib import Path

# The fake runner stands beside the tests that use it; the import mode adds no folder by itself.
sys.path.insert(0, str(Path(__file__).parent))
