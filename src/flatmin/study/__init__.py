"""Did it help: methods compared on a task, paired by seed, with the cost beside the gain."""

from flatmin.study._compare import compare
from flatmin.study._record import Record
from flatmin.study._result import StudyResult
from flatmin.study._task import Data, Task, cosine, load_task

__all__ = ["Data", "Record", "StudyResult", "Task", "compare", "cosine", "load_task"]
