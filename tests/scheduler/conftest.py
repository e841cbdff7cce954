import sys
from pathlib import Path

# What the tests share stands beside them; the import mode adds no folder by itself.
sys.path.insert(0, str(Path(__file__).parent))
