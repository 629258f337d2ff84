"""A scikit-learn task: cross-validate one random forest."""

from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import cross_val_score


def train(cell, *, trees: int, depth: int | None = None, features: float | str = "sqrt", seed: int = 0):
    """`depth` may be null, `features` a fraction or a name: values keep their type."""
    forest = RandomForestClassifier(trees, max_depth=depth, max_features=features, random_state=seed)
    scores = cross_val_score(forest, *load_breast_cancer(return_X_y=True), cv=3)
    return {"accuracy": scores.mean(), "folds": scores}
