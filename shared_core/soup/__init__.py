"""Averages of weights: of checkpoints (soups: uniform, weighted, greedy by a metric), and running ones in training."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from shared_core.soup.adapters import AdapterWeights as AdapterWeights
    from shared_core.soup.config import SoupConfig as SoupConfig
    from shared_core.soup.diagnosis import Diagnosis as Diagnosis
    from shared_core.soup.diagnosis import diagnose as diagnose
    from shared_core.soup.greedy import SoupResult as SoupResult
    from shared_core.soup.greedy import greedy_soup as greedy_soup
    from shared_core.soup.reports import diagnosis_plot as diagnosis_plot
    from shared_core.soup.reports import diagnosis_table as diagnosis_table
    from shared_core.soup.reports import noise_of as noise_of
    from shared_core.soup.reports import path_json as path_json
    from shared_core.soup.reports import path_plot as path_plot
    from shared_core.soup.reports import path_table as path_table
    from shared_core.soup.saving import save_soup as save_soup
    from shared_core.soup.scoring import logged_metrics as logged_metrics
    from shared_core.soup.scoring import rank_by_logged as rank_by_logged
    from shared_core.soup.technique import ModelSoup as ModelSoup
    from shared_core.soup.uniform import uniform_soup as uniform_soup

export_lazily(__name__)
