"""Jobs that wait in a folder until SGLang asks for their pages (hicache.py).

Who drops one asks the service for a plan first: it says which mapper would translate, and so the
``cache_salt`` that the request to the target's engine has to carry. The file is named by the hash
of the last page of the plan under that salt. Such a hash covers all tokens up to the page's end: so
only a request that begins with the job's tokens, and carries the salt, can start the job.
"""

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from mappers.errors import KVTranslatorError
from mappers.identity import IdentityClaim
from mappers.layouts import Layout
from service.bridge.carry import Carried, Job, not_carried
from service.bridge.pages import page_hashes, write_whole
from service.client import Client
from service.hf import PREFIX_TOKENS
from service.schemas import Plan, TranslateRequest
from service.vllm.params import salt

Claims = tuple[IdentityClaim, IdentityClaim]


class LessThanAPage(KVTranslatorError):
    """There is no page to be named by."""

    code = "less_than_a_chunk"


class Inbox:
    """``page_tokens`` is the ``--page-size`` of both engines."""

    def __init__(self, folder: Path, page_tokens: int) -> None:
        self._folder, self._page_tokens = folder, page_tokens

    def drop(self, client: Client, claims: Claims, job: Job) -> Carried:
        """What the plan promises of this job, which then waits; or why it does not."""
        try:
            plan = client.plan(self._request(claims, job))
            if plan.decision != "translate":
                return not_carried(plan.reason or "no_plan", plan.detail or "")
            return self._put(job, plan)
        except KVTranslatorError as error:
            return not_carried(error.code, str(error))

    def _request(self, claims: Claims, job: Job) -> TranslateRequest:
        return TranslateRequest(
            source=claims[0],
            target=claims[1],
            tokens=self._whole(len(job.token_ids)),
            layout=Layout.NHD,
            prefix_token_ids=job.token_ids[:PREFIX_TOKENS],
            **{**job.limits, "hops": job.hops_so_far},
        )

    def _put(self, job: Job, plan: Plan) -> Carried:
        tokens, hops = self._whole(plan.tokens), job.hops_so_far + 1
        under = salt(plan.digest, hops, job.session)
        last = page_hashes(job.token_ids[:tokens], under, self._page_tokens)[-1]
        said = job.model_dump_json(exclude_defaults=True).encode()
        write_whole(self._folder / f"{last}.json", said)
        return Carried(
            decision="translate",
            tokens=tokens,
            cache_salt=under,
            hops=hops,
            mapper=plan.mapper,
            kl_bound=plan.kl_bound,
        )

    def _whole(self, tokens: int) -> int:
        whole = tokens - tokens % self._page_tokens
        if whole == 0:
            raise LessThanAPage(f"{tokens} tokens are less than a page of {self._page_tokens}")
        return whole

    def take(self, pages: Sequence[str]) -> Job | None:
        """The longest job that ends with one of these, a prompt's pages by their hashes: once, as
        it is no longer there afterwards."""
        try:
            waiting = {path.stem: path for path in self._folder.iterdir()}
            last = next((page for page in reversed(pages) if page in waiting), None)
            if last is None:
                return None
            said = waiting[last].read_bytes()
            waiting[last].unlink()
            return Job.model_validate_json(said)
        except (OSError, ValidationError):
            return None
