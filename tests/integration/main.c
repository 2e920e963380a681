/* main() of the tests of a real daemon that have none.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/integration/harness.h"

int main(void)
{
        return harness_cases(suite_name());
}
