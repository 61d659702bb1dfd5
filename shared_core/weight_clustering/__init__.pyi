from .clustering import SharedValues as SharedValues
from .clustering import kmeans_1d as kmeans_1d
from .clustering import share_values as share_values
from .config import ClusterConfig as ClusterConfig
from .technique import WeightClustering as WeightClustering
