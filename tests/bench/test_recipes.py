"""Every recipe is a run that its machine has memory for; `bench/recipes.py` plans all in full."""

import re
from collections import Counter
from functools import cache

import pytest
from thorough import cases

from bench import recipes
from flexengine.plan import Plan
from flexengine.planner.feasibility.shortage import Feasibility
from flexengine.planner.problem import Problem

RECIPES = recipes.recipes()


@cache
def plan_of(recipe: str) -> Plan:
    """A plan of some speed, as the planner searches shortly in tests."""
    return next(r for r in RECIPES if r.name == recipe).plan()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_fits_its_machine(recipe):
    """Some plan keeps to the budgets, which leave room for the system."""
    request, memory = recipe.request, recipe.profile.memory
    assert request.max_gpu_bytes < memory.gpu_total_bytes
    assert request.max_host_bytes < 0.95 * memory.host_total_bytes
    if request.ranks == 1:
        assert Feasibility(Problem(recipe.model, request, recipe.profile)).fits()
    else:
        check_budgets(recipe)


STEMS = ["qwen3-0.6b-full", "qwen3-8b-lora", "gpt-oss-20b-lora"]


@pytest.mark.parametrize("stem", cases(STEMS, STEMS[1:]))
def test_a_plan_of_a_recipe_keeps_to_its_budgets(stem):
    """One of each kind: all weights, adapters, adapters beside a base that is stored in fewer bits."""
    check_budgets(next(r for r in RECIPES if r.path.stem == stem))


def check_budgets(recipe: recipes.Recipe) -> None:
    predicted = plan_of(recipe.name).predicted
    assert predicted.gpu_bytes <= recipe.request.max_gpu_bytes
    assert predicted.host_bytes <= recipe.request.max_host_bytes


def test_there_are_recipes_for_all_machines_and_many_models():
    assert len({recipe.config.model for recipe in RECIPES}) >= 10
    assert set(Counter(recipe.path.parent.name for recipe in RECIPES)) == set(recipes.MACHINES)


def test_the_page_has_every_recipe():
    page = recipes.PAGE.read_text()
    for recipe in RECIPES:
        assert f"](../{recipe.name})" in page
        assert f"--config {recipe.name} " in recipe.path.read_text()


def test_the_readme_says_what_the_page_says():
    readme, page = (recipes.ROOT / "README.md").read_text(), recipes.PAGE.read_text()
    told = re.findall(r"predicted (\d+ tokens/s).*\n.*--config (\S+) ", readme)
    assert len(told) == 3
    for speed, recipe in told:
        (row,) = [line for line in page.splitlines() if f"](../{recipe})" in line]
        assert f"| {speed} |" in row


def test_a_row_tells_what_a_plan_says(monkeypatch):
    recipe = next(r for r in RECIPES if r.path.stem == "qwen3-0.6b-full")
    plan = plan_of(recipe.name)
    speed = recipe.config.max_global_batch_tokens / plan.predicted.step_s
    monkeypatch.setattr(recipes.Recipe, "plan", lambda _: plan)
    assert recipes.row(recipe).startswith(f"| [Qwen/Qwen3-0.6B](../{recipe.name}) | full | {speed:.0f} tokens/s | ")
