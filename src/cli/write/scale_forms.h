/* cli/write/scale_forms.h: scales from one layout's form into another's, and back to the same bytes.
 *
 * compressed-tensors divides by its global scale and ModelOpt multiplies with it. One over one over a float is not always
 * that float, and powers of two may be stored in one byte or four; where a form cannot be made again from the other, the
 * file's metadata keeps it: "opaq.was:NAME", which a later conversion reads. */
#ifndef OPAQ_CLI_WRITE_SCALE_FORMS_H
#define OPAQ_CLI_WRITE_SCALE_FORMS_H

#include "cli/write/plan.h"

/* A tensor of block scales, as the first of `dtypes` (opaq/layout.h) that holds the same numbers. */
enum opaq_status scale_form_convert(struct plan *plan, const struct model_tensor *scale, const char *dtypes,
                                    const char *name, const int64_t *shape, int rank, struct opaq_error *error);

/* A global scale, or the scale of an input: one float, or one for each of a stack. `inverts`: one over it. */
enum opaq_status scale_form_global(struct plan *plan, const struct model_tensor *global,
                                   const struct opaq_layout_row *scheme, bool inverts, const char *name,
                                   struct opaq_error *error);

/* What the source's files keep for the way back goes no further. */
void scale_forms_forget(struct plan *plan);

#endif
