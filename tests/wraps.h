/* Functions that a test may replace also in the libraries that it links. Each library is linked with --wrap=NAME, so
 * it calls __wrap_NAME: the test's, or else this one, which calls NAME.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_WRAPS_H
#define BFC_TESTS_WRAPS_H

#define WRAP(type, name, parameters, arguments)                                                              \
        type __real_##name parameters;                                                                       \
        type __wrap_##name parameters;                                                                       \
        type __wrap_##name parameters                                                                        \
        {                                                                                                    \
                return __real_##name arguments;                                                              \
        }

#endif
