"""What the service would decide for prompts of the lengths that a mapper was measured at."""

from mappers.identity import IdentityClaim
from mappers.layouts import Layout
from service.client import Client, NotTranslated
from service.commands.exits import Code
from service.doctor.findings import Finding, fail, ok, warn
from service.listed import claim_of_listed
from service.schemas import MapperInfo, Plan, TranslateRequest


def check_plans(client: Client, mapper: MapperInfo) -> Finding:
    """``/translate/plan`` of any text whose first tokens are not known, without limits."""
    check = f"plan {mapper.id}"
    source, target = claim_of_listed(mapper.source), claim_of_listed(mapper.target)
    if source is None or target is None:
        change = "ask /translate/plan yourself, with the rope_parameters of the manifest"
        return warn(check, "not asked: the mapper is of models whose rope is scaled", change)
    plans: dict[int, Plan] = {}
    try:
        for tokens in mapper.certified_tokens:
            plans[tokens] = client.plan(_request(source, target, tokens))
    except NotTranslated as error:
        change = "this refusal is what every such request gets"
        return fail(check, Code.REPREFILL, str(error), change)
    return _judged(check, plans)


def _judged(check: str, plans: dict[int, Plan]) -> Finding:
    said = "; ".join(f"{tokens} tokens: {_said(plan)}" for tokens, plan in plans.items())
    refused = [plan for plan in plans.values() if plan.decision == "reprefill"]
    if not refused:
        return ok(check, said)
    change = refused[0].detail or ""
    if len(refused) == len(plans):
        return fail(check, Code.REPREFILL, said or "no length was measured", change)
    return warn(check, said, change)


def _said(plan: Plan) -> str:
    if plan.decision == "reprefill":
        return f"re-prefill, {plan.reason}"
    return f"translate, native tail {plan.native_tail}, KL bound {plan.kl_bound:.3g}"


def _request(source: IdentityClaim, target: IdentityClaim, tokens: int) -> TranslateRequest:
    return TranslateRequest(source=source, target=target, tokens=tokens, layout=Layout.NHD)
