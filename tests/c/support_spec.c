/* support_spec.c: all valid specs. The rules are written out as in docs/spec.md, table by table. */
#include "support_spec.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool is_fp8_family(int format) { return format >= OPAQ_FP8 && format <= OPAQ_FP8BLK2; }

static bool is_mx(int format) { return format == OPAQ_MXFP8 || format == OPAQ_MXFP4; }

/* The column "formats" of the table of options. */
static bool takes_option(int format, int option) {
    switch (option) {
    case OPAQ_DELAYED:
        return format == OPAQ_FP8;
    case OPAQ_POW2:
        return is_fp8_family(format);
    case OPAQ_2D:
    case OPAQ_SWIZZLED:
        return is_mx(format) || format == OPAQ_NVFP4;
    case OPAQ_HADAMARD:
    case OPAQ_ROWSCALED:
    case OPAQ_4OVER6:
    case OPAQ_GLOBAL:
        return format == OPAQ_NVFP4;
    case OPAQ_STOCHASTIC:
        return true;
    default:
        return false;
    }
}

/* The table of combinations that are not allowed. */
static bool is_compatible(const struct opaq_spec *s) {
    const int o = s->options;
    const bool foreign_rule = s->rule == OPAQ_RULE_COMPRESSED_TENSORS || s->rule == OPAQ_RULE_MODELOPT;
    return !((o & OPAQ_2D) && (o & (OPAQ_HADAMARD | OPAQ_ROWSCALED))) &&
           !((o & OPAQ_4OVER6) && (o & (OPAQ_HADAMARD | OPAQ_STOCHASTIC))) &&
           !((o & OPAQ_DELAYED) && ((o & OPAQ_POW2) || s->epsilon > 0.0f)) &&
           !((s->rule == OPAQ_RULE_OCP || s->rule == OPAQ_RULE_RCEIL) && !is_mx(s->format)) &&
           !(!foreign_rule && (o & OPAQ_GLOBAL)) &&
           !(foreign_rule &&
             (s->element == OPAQ_E5M2 || (o & ~(OPAQ_DELAYED | OPAQ_ROWSCALED | OPAQ_SWIZZLED | OPAQ_GLOBAL)) ||
              s->epsilon > 0.0f));
}

static bool parameters_fit(const struct opaq_spec *s) {
    const bool four = (s->options & OPAQ_4OVER6) != 0;
    const bool mask_fits = (s->options & OPAQ_HADAMARD) || s->hadamard_mask == 0;
    const bool mode_fits = four ? s->error_mode == 1 || s->error_mode == 2 : s->error_mode == 0;
    const bool max_fits =
        s->format != OPAQ_NVFP4 ? s->e4m3_max == 0 : s->e4m3_max == 448 || (four && s->e4m3_max == 256);
    const bool eps_fits =
        isfinite(s->epsilon) && !signbit(s->epsilon) && (s->epsilon == 0.0f || is_fp8_family(s->format));
    return mask_fits && mode_fits && max_fits && eps_fits && s->reserved == 0;
}

bool spec_is_valid(const struct opaq_spec *s) {
    if (s->format > OPAQ_NVFP4 || s->usage < 1 || s->usage > 3 || s->rule > OPAQ_RULE_MODELOPT) {
        return false;
    }
    const bool four_bit = s->format == OPAQ_MXFP4 || s->format == OPAQ_NVFP4;
    if (four_bit ? s->element != OPAQ_E2M1 : s->element != OPAQ_E4M3 && s->element != OPAQ_E5M2) {
        return false;
    }
    for (int bit = 0; bit < 16; ++bit) {
        if ((s->options >> bit & 1) && !takes_option(s->format, 1 << bit)) {
            return false;
        }
    }
    return is_compatible(s) && parameters_fit(s);
}

static void append(struct spec_list *list, const struct opaq_spec *spec) {
    struct opaq_spec *grown = realloc(list->spec, (size_t)(list->count + 1) * sizeof *grown);
    if (grown == NULL) {
        exit(1);
    }
    grown[list->count++] = *spec;
    list->spec = grown;
}

static const uint16_t masks[] = {OPAQ_HADAMARD_MASK_DEFAULT, 0, 1, 0x8000, 0xFFFF, 0xD7E9};
static const float epsilons[] = {0.0f, 1e-12f, 0.25f, 1.0f, 2.5f, 1e10f, 0x1p-149f, 0x1.FFFFFEp127f, 0.1f};

/* Adds the valid parameters of one combination; only the first with SPEC_DEFAULTS. */
static void append_parameters(struct spec_list *list, struct opaq_spec spec, enum spec_set set) {
    const bool all = set == SPEC_PARAMETERS;
    const bool rht = (spec.options & OPAQ_HADAMARD) != 0;
    const bool four = (spec.options & OPAQ_4OVER6) != 0;
    for (size_t m = 0; m < (rht && all ? sizeof masks / sizeof masks[0] : 1); ++m) {
        for (int mode = four ? 1 : 0; mode <= (four ? (all ? 2 : 1) : 0); ++mode) {
            for (int wide = 0; wide < (four && all ? 2 : 1); ++wide) {
                for (size_t e = 0; e < (all ? sizeof epsilons / sizeof epsilons[0] : 1); ++e) {
                    spec.hadamard_mask = rht ? masks[m] : 0;
                    spec.error_mode = (uint8_t)mode;
                    spec.e4m3_max = spec.format != OPAQ_NVFP4 ? 0 : four && !wide ? 256 : 448;
                    spec.epsilon = epsilons[e];
                    if (spec_is_valid(&spec)) {
                        append(list, &spec);
                    }
                }
            }
        }
    }
}

struct spec_list spec_list_make(enum spec_set set) {
    struct spec_list list = {0, NULL};
    struct opaq_spec spec;
    memset(&spec, 0, sizeof spec);
    for (int format = 0; format < OPAQ_FORMAT_COUNT; ++format) {
        for (int element = 0; element < OPAQ_ELEMENT_COUNT; ++element) {
            for (int usage = 1; usage <= 3; ++usage) {
                for (int rule = 0; rule < OPAQ_RULE_COUNT; ++rule) {
                    for (int options = 0; options < 1 << OPAQ_OPTION_COUNT; ++options) {
                        spec.format = (uint8_t)format;
                        spec.element = (uint8_t)element;
                        spec.usage = (uint8_t)usage;
                        spec.rule = (uint8_t)rule;
                        spec.options = (uint16_t)options;
                        append_parameters(&list, spec, set);
                    }
                }
            }
        }
    }
    return list;
}

void spec_list_free(struct spec_list *list) {
    free(list->spec);
    *list = (struct spec_list){0, NULL};
}

struct opaq_spec spec_of(const char *text) {
    struct opaq_spec spec;
    struct opaq_error error;
    if (opaq_spec_parse(text, strlen(text), &spec, &error) != OPAQ_OK) {
        printf("  %s\n", error.text);
        exit(1);
    }
    return spec;
}

struct spec_text spec_text(const struct opaq_spec *spec) {
    struct spec_text result;
    if (opaq_spec_print(spec, result.text, sizeof result.text, NULL) != OPAQ_OK) {
        (void)snprintf(result.text, sizeof result.text, "(invalid)");
    }
    return result;
}
