# %% [markdown]
# # From measured rows to a profile
#
# **Question.** `pdreal measure` timed forwards and transfers on H200s. Which profile do the rows give, and how well
# does it predict shapes it was not fitted to?

# %%
# %matplotlib inline
import pandas as pd
from setting import REAL, residuals

from pdsim.calibration.fit.profile import calibrate
from pdsim.calibration.fit.rows import read_rows

# %%
made = calibrate(read_rows(sorted((REAL / "data").glob("*.csv"))), gpu="h200")
pd.DataFrame(
    {
        part: {"form": fit.form.name, "rows": len(fit.rows), "shapes": fit.num_shapes, "held-out error": fit.error}
        for part, fit in made.fits.items()
    }
).T

# %% [markdown]
# Rows of one shape are held out together. Each point below was predicted by a fit that had not seen its shape.

# %%
residuals("decode", made.fits["decode"])

# %%
residuals("prefill", made.fits["prefill"])

# %% [markdown]
# **Reading.** A decode step is known within a percent: a knot for each CUDA graph, and a straight line of KV tokens.
# Prefill is harder: where the mean error of the straight lines is above 5 %, a table is tried as well, and the better
# of the two on held-out shapes is taken. The profile says which shapes were measured, and a run that leaves them warns.

# %%
assert made.fits["decode"].error < 0.05
assert made.fits["decode"].error < made.fits["prefill"].error
