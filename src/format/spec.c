/* format/spec.c: validation, comparison and hashing of specs. Grammar and rules: docs/spec.md. */
#include "opaq/spec.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/float_bits.h"
#include "base/try.h"
#include "opaq/status.h"

_Static_assert(sizeof(struct opaq_spec) == 16, "opaq_spec is a value of 16 bytes without padding");

/* Pairs of options that exclude each other; docs/spec.md says why. */
static const struct {
    uint16_t option;
    uint16_t excludes;
} exclusions[] = {
    {OPAQ_2D, OPAQ_HADAMARD},       {OPAQ_2D, OPAQ_ROWSCALED}, {OPAQ_4OVER6, OPAQ_HADAMARD},
    {OPAQ_4OVER6, OPAQ_STOCHASTIC}, {OPAQ_DELAYED, OPAQ_POW2}, {OPAQ_SWIZZLED, OPAQ_TILED},
    {OPAQ_HADAMARD, OPAQ_TILED},
};

/* Options that the rules of checkpoint software allow. */
enum { foreign_options = OPAQ_DELAYED | OPAQ_ROWSCALED | OPAQ_SWIZZLED | OPAQ_GLOBAL | OPAQ_TILED };

/* Tests the bits: a float comparison would miss a subnormal value if the caller flushes those to zero. */
static bool has_epsilon(const struct opaq_spec *spec) { return float_to_bits(spec->epsilon) != 0; }

enum opaq_status opaq_spec_make(enum opaq_format format, struct opaq_spec *spec, struct opaq_error *error) {
    const struct opaq_format_row *row = opaq_format_row(format);
    if (row == NULL || spec == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "spec_make: %s",
                         spec == NULL ? "spec is NULL" : "unknown format number");
    }
    memset(spec, 0, sizeof *spec);
    spec->format = (uint8_t)format;
    spec->element = (uint8_t)row->element_default;
    spec->usage = OPAQ_ROWWISE;
    spec->rule = OPAQ_RULE_TE;
    spec->e4m3_max = format == OPAQ_NVFP4 ? 448 : 0;
    return OPAQ_OK;
}

/* "delayed, pow2, sr" of a set of options. */
static void list_options(uint32_t options, char *buffer, size_t capacity) {
    size_t length = 0;
    buffer[0] = '\0';
    for (int i = 0; i < OPAQ_OPTION_COUNT; ++i) {
        if ((options & 1u << i) && length < capacity) {
            length += (size_t)snprintf(buffer + length, capacity - length, "%s%s", length ? ", " : "",
                                       opaq_option_name((enum opaq_option)(1 << i)));
        }
    }
}

static const char *first_option(uint32_t options) {
    return opaq_option_name((enum opaq_option)(options & (~options + 1u)));
}

static enum opaq_status check_options(const struct opaq_spec *spec, const struct opaq_format_row *row,
                                      struct opaq_error *error) {
    const uint32_t foreign = spec->options & ~row->options;
    if (foreign >= 1u << OPAQ_OPTION_COUNT) {
        return opaq_fail(error, OPAQ_ERROR_SPEC, "spec: options is 0x%x, which has unknown bits",
                         spec->options);
    }
    if (foreign != 0) {
        char known[128];
        list_options(row->options, known, sizeof known);
        return opaq_fail(error, OPAQ_ERROR_SPEC, "spec: %s does not take \"%s\"; of the options it takes %s",
                         row->name, first_option(foreign), known);
    }
    for (size_t i = 0; i < sizeof exclusions / sizeof exclusions[0]; ++i) {
        const uint16_t both = exclusions[i].option | exclusions[i].excludes;
        if ((spec->options & both) == both) {
            return opaq_fail(error, OPAQ_ERROR_SPEC, "spec: \"%s\" does not go with \"%s\"",
                             first_option(exclusions[i].option), first_option(exclusions[i].excludes));
        }
    }
    return OPAQ_OK;
}

static enum opaq_status check_rule(const struct opaq_spec *spec, const struct opaq_format_row *row,
                                   struct opaq_error *error) {
    const char *rule = opaq_rule_name((enum opaq_rule)spec->rule);
    if (rule == NULL || (row->rules & 1u << spec->rule) == 0) {
        return opaq_fail(error, OPAQ_ERROR_SPEC, "spec: %s does not have the rule \"%s\"", row->name,
                         rule == NULL ? "unknown" : rule);
    }
    if (spec->rule != OPAQ_RULE_COMPRESSED_TENSORS && spec->rule != OPAQ_RULE_MODELOPT) {
        if (spec->options & OPAQ_GLOBAL) {
            return opaq_fail(error, OPAQ_ERROR_SPEC,
                             "spec: rule \"%s\" does not go with \"global\": only compressed-tensors and "
                             "modelopt have a global scale",
                             rule);
        }
        return OPAQ_OK;
    }
    const uint32_t extra = spec->options & ~(uint32_t)foreign_options;
    if (extra != 0 || has_epsilon(spec)) {
        return opaq_fail(error, OPAQ_ERROR_SPEC, "spec: rule \"%s\" does not go with \"%s\"", rule,
                         extra != 0 ? first_option(extra) : "eps");
    }
    if (spec->element == OPAQ_E5M2) {
        return opaq_fail(error, OPAQ_ERROR_SPEC, "spec: rule \"%s\" does not have the element \"e5m2\"", rule);
    }
    return OPAQ_OK;
}

/* The fields that belong to one option are zero without it, so that one value has one representation. */
static enum opaq_status check_parameters(const struct opaq_spec *spec, const struct opaq_format_row *row,
                                         struct opaq_error *error) {
    const bool four_over_six = (spec->options & OPAQ_4OVER6) != 0;
    if ((spec->options & OPAQ_HADAMARD) == 0 && spec->hadamard_mask != 0) {
        return opaq_fail(error, OPAQ_ERROR_SPEC, "spec: hadamard_mask is 0x%04x without \"rht\"",
                         spec->hadamard_mask);
    }
    if (four_over_six ? spec->error_mode != OPAQ_ERROR_MODE_MAE && spec->error_mode != OPAQ_ERROR_MODE_MSE
                      : spec->error_mode != OPAQ_ERROR_MODE_NONE) {
        return opaq_fail(error, OPAQ_ERROR_SPEC, "spec: error_mode is %d %s \"4over6\"", spec->error_mode,
                         four_over_six ? "with" : "without");
    }
    const bool nvfp4 = row->format == OPAQ_NVFP4;
    if (nvfp4 ? spec->e4m3_max != 448 && spec->e4m3_max != 256 : spec->e4m3_max != 0) {
        return opaq_fail(error, OPAQ_ERROR_SPEC, "spec: e4m3max is %d, expected %s for %s", spec->e4m3_max,
                         nvfp4 ? "448 or 256" : "0", row->name);
    }
    if (spec->e4m3_max == 256 && !four_over_six) {
        return opaq_fail(error, OPAQ_ERROR_SPEC, "spec: \"e4m3max=256\" does not go without \"4over6\"");
    }
    if (!float_is_finite(spec->epsilon) || float_to_bits(spec->epsilon) > 0x7FFFFFFFu) {
        return opaq_fail(error, OPAQ_ERROR_SPEC, "spec: eps is %g, expected a finite number of at least 0",
                         (double)spec->epsilon);
    }
    if (has_epsilon(spec) && ((row->options & OPAQ_POW2) == 0 || (spec->options & OPAQ_DELAYED) != 0)) {
        return opaq_fail(error, OPAQ_ERROR_SPEC, "spec: %s does not go with \"eps\"",
                         (row->options & OPAQ_POW2) == 0 ? row->name : "\"delayed\"");
    }
    if (spec->reserved != 0) {
        return opaq_fail(error, OPAQ_ERROR_SPEC, "spec: reserved is %d, expected 0", spec->reserved);
    }
    return OPAQ_OK;
}

enum opaq_status opaq_spec_check(const struct opaq_spec *spec, struct opaq_error *error) {
    if (spec == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "spec: NULL");
    }
    const struct opaq_format_row *row = opaq_format_row((enum opaq_format)spec->format);
    if (row == NULL) {
        return opaq_fail(error, OPAQ_ERROR_SPEC, "spec: format is %d, expected 0 to %d", spec->format,
                         OPAQ_FORMAT_COUNT - 1);
    }
    if (spec->element >= OPAQ_ELEMENT_COUNT || (row->elements & 1u << spec->element) == 0) {
        const struct opaq_element_info *info = opaq_element_info((enum opaq_element)spec->element);
        return opaq_fail(error, OPAQ_ERROR_SPEC, "spec: %s does not hold the element \"%s\"", row->name,
                         info == NULL ? "unknown" : info->name);
    }
    if (spec->usage == 0 || (spec->usage & ~OPAQ_BOTH) != 0) {
        return opaq_fail(error, OPAQ_ERROR_SPEC,
                         "spec: usage is %d, expected 1 (rowwise), 2 (columnwise) or 3 (both)", spec->usage);
    }
    if ((spec->options & OPAQ_TILED) && spec->usage != OPAQ_ROWWISE) {
        return opaq_fail(error, OPAQ_ERROR_SPEC, "spec: \"tiled\" does not go with \"%s\"",
                         spec->usage == OPAQ_BOTH ? "both" : "columnwise");
    }
    TRY(check_options(spec, row, error));
    TRY(check_rule(spec, row, error));
    return check_parameters(spec, row, error);
}

int opaq_spec_equal(const struct opaq_spec *a, const struct opaq_spec *b) {
    if (a == NULL || b == NULL) {
        return 0;
    }
    return a->format == b->format && a->element == b->element && a->usage == b->usage && a->rule == b->rule &&
           a->options == b->options && a->hadamard_mask == b->hadamard_mask && a->e4m3_max == b->e4m3_max &&
           a->error_mode == b->error_mode && a->reserved == b->reserved &&
           float_to_bits(a->epsilon) == float_to_bits(b->epsilon);
}

/* Hashes the 16 bytes: there is no padding, and check_parameters ensures that a value has one representation. */
uint64_t opaq_spec_hash(const struct opaq_spec *spec) {
    uint64_t word[2];
    if (spec == NULL) {
        return 0;
    }
    memcpy(word, spec, sizeof word);
    uint64_t hash = 0x9E3779B97F4A7C15u;
    for (int i = 0; i < 2; ++i) { /* the finalizer of splitmix64 */
        hash ^= word[i];
        hash = (hash ^ (hash >> 30)) * 0xBF58476D1CE4E5B9u;
        hash = (hash ^ (hash >> 27)) * 0x94D049BB133111EBu;
        hash ^= hash >> 31;
    }
    return hash;
}
