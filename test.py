"""What femtoqueue promises, by test."""

import tempfile
import unittest

from femtoqueue import FemtoQueue


class Lifecycle(unittest.TestCase):
    def test_a_task_goes_from_pending_to_done(self) -> None:
        with tempfile.TemporaryDirectory() as data_dir, FemtoQueue(data_dir, "n1") as q:
            q.push(b"x")
            task = q.pop()
            assert task is not None
            q.done(task)
            self.assertEqual((q.pop(), q.stats().done), (None, 1))


if __name__ == "__main__":
    unittest.main()
