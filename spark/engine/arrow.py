"""DataFrame.mapInArrow, which asks for pandas though it never uses it (PySpark 4.3): this one does not."""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

if TYPE_CHECKING:
    import pyarrow as pa


def map_in_arrow(
    frame: DataFrame,
    function: "Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]",
    schema: str,
    barrier: bool = False,
) -> DataFrame:
    """Each partition's record batches -> record batches of `schema` (DDL), by Python on the executors."""
    inner: Any = frame
    udf = UserDefinedFunction(function, returnType=schema, evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    column: Any = udf(*[frame[f"`{name}`"] for name in frame.columns])
    return DataFrame(inner._jdf.mapInArrow(column._jc, barrier, None), frame.sparkSession)
