/* cli/report/coverage.c: see coverage.h. */
#include "cli/report/coverage.h"

#include "cli/read/checkpoint.h"

static const struct {
    const char *name;
    const char *text;
} words[COVERAGE_COUNT] = {
    [COVERED] = {"quantized", "quantized"},
    [SKIPPED_OTHER] = {"not_linear", "not the matrix of a linear layer"},
    [SKIPPED_EMBEDDING] = {"embedding", "embeddings"},
    [SKIPPED_BY_DEFAULT] = {"default", "ignored by default (--no-default-ignore quantizes them)"},
    [SKIPPED_IGNORED] = {"ignored", "by --ignore"},
    [SKIPPED_NOT_INCLUDED] = {"not_included", "not named by --include"},
    [SKIPPED_RAGGED] = {"ragged", "rows that are not whole blocks of the format"},
    [SKIPPED_STACKED] = {"stacked", "stacked matrices that the layout has no names for"},
    [SKIPPED_INTERLEAVED] = {"interleaved", "gpt-oss's experts, which only --layout gpt-oss stores"},
    [SKIPPED_NOT_EXPERTS] = {"not_experts", "not experts: the layout gpt-oss stores only experts"},
    [SKIPPED_SOURCE] = {"source", "not quantized in the source"},
};

void coverage_add(struct coverages *coverages, enum coverage coverage, const struct weight *weight) {
    struct coverage_tally *const tally = &coverages->of[coverage];
    tally->first = tally->weights++ == 0 ? weight->name : tally->first;
    tally->parameters += weight_elements(weight);
}

const char *coverage_name(enum coverage coverage) { return words[coverage].name; }
const char *coverage_text(enum coverage coverage) { return words[coverage].text; }

uint64_t coverage_parameters(const struct coverages *coverages) {
    uint64_t all = 0;
    for (int i = 0; i < COVERAGE_COUNT; ++i) {
        all += coverages->of[i].parameters;
    }
    return all;
}
