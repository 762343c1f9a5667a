/* cli/write/scale_forms.h: converts scales between the forms of two layouts so that converting back gives the same
 * bytes.
 *
 * compressed-tensors divides by its global scale and ModelOpt multiplies by it. The inverse of the inverse of a float
 * is not always that float, and powers of two may be stored in one byte or four; where a form cannot be recomputed
 * from the other, the file's metadata keeps it as "opaq.was:NAME", which a later conversion reads. */
#ifndef OPAQ_CLI_WRITE_SCALE_FORMS_H
#define OPAQ_CLI_WRITE_SCALE_FORMS_H

#include "cli/write/manifest.h"

/* Adds a tensor of block scales, with the first of `dtypes` (opaq/layout.h) that represents the same numbers. */
enum opaq_status scale_form_convert(struct manifest *manifest, const struct model_tensor *scale,
                                    const char *dtypes, const char *name, const int64_t *shape, int rank,
                                    struct opaq_error *error);

/* Adds a global scale or an input scale: one float, or one for each matrix of a stack. `inverts`: its inverse. */
enum opaq_status scale_form_global(struct manifest *manifest, const struct model_tensor *global,
                                   const struct opaq_layout_row *scheme, bool inverts, const char *name,
                                   struct opaq_error *error);

/* Removes the kept forms of the source from the manifest's metadata. */
void scale_forms_forget(struct manifest *manifest);

#endif
