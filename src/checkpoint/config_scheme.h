/* checkpoint/config_scheme.h: schemes from what a configuration says of weights and inputs. Depends on
 * checkpoint/config_tree.h. */
#ifndef OPAQ_CHECKPOINT_CONFIG_SCHEME_H
#define OPAQ_CHECKPOINT_CONFIG_SCHEME_H

#include "checkpoint/config_tree.h"

/* A group of compressed-tensors; ModelOpt's quant_algo, which may be NULL; all of a configuration in DeepSeek's manner; of
 * gpt-oss's. */
enum opaq_status scheme_of_group(const struct config_tree *tree, int64_t group,
                                 struct opaq_config_scheme *scheme, struct opaq_error *error);
enum opaq_status scheme_of_algorithm(const char *algorithm, struct opaq_config_scheme *scheme,
                                     struct opaq_error *error);
enum opaq_status scheme_of_deepseek(const struct config_tree *tree, struct opaq_config_scheme *scheme,
                                    struct opaq_error *error);
void scheme_of_gpt_oss(struct opaq_config_scheme *scheme);

/* Comparisons that ignore the case of ASCII letters. */
bool is_same_name(const char *a, const char *b);
bool has_prefix(const char *name, const char *prefix);

#endif
