"""Compression: weights that share few values, stored in one small file."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from shared_core.weight_clustering.clustering import SharedValues as SharedValues
    from shared_core.weight_clustering.clustering import kmeans_1d as kmeans_1d
    from shared_core.weight_clustering.clustering import share_values as share_values
    from shared_core.weight_clustering.config import ClusterConfig as ClusterConfig
    from shared_core.weight_clustering.technique import WeightClustering as WeightClustering

export_lazily(__name__)
