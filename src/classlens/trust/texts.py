"""The plain words of an audit bundle: how it was measured, and what it cannot say."""

from __future__ import annotations

PROTOCOL = """# How this was measured

1. Pictures: at most {limit} of {name}, drawn by seed {seed} from the names of the files. rows.parquet lists each
   with the SHA-256 of its file. Pictures that could not be used are listed in settings.json.
2. Prediction: one forward pass of {model} for each picture, with the preprocessing in settings.json.
3. Map: the evidence for the predicted class, by {method} ({summary}). Its positive part is measured below, as
   shares of its sum.
4. Where: `border` is the share in the outer tenth of the picture, `half` the smallest part of a 16 x 16 grid that
   holds half of the evidence, `against` the share of all evidence that is against the class. With a mask, `inside`
   is the share on the object and `area` the object's share of the picture.
5. Hiding: `hidden_evidence` is the probability of the class when the cells with half of the evidence are filled
   from their surroundings; `hidden_elsewhere` when as many random other cells are; `hidden_object` when the object
   is.

`classlens verify BUNDLE` checks the hash of every file, the weights, and the pictures, then repeats steps 2 to 5
for a sample and compares every number.
"""

LIMITATIONS = """# What this does not show

- A map shows where the network finds evidence for a class. It does not show that the network is right, fair or
  safe, and it does not show why the evidence counts.
- {trust}
- The findings hold for these {count} pictures and these weights. Other pictures, other weights or another
  preprocessing may give other findings; {model} was not tested on anything else here.
- Hiding a part of a picture makes a picture that the network has never seen. A fall in probability may be due to
  that too; the comparison with as many other cells is there for this reason.
- {masks}
- {labels}
- Nobody has looked at every picture: the page shows the typical and the most surprising ones.
- The hashes show that nothing was changed by accident. Anyone who can write the bundle can also write new hashes:
  to prove who made it and when, sign manifest.json.
"""

WITH_MASKS = "`inside` depends on the masks: where a mask is wrong, so is the share on the object."
WITHOUT_MASKS = (
    "There are no masks: the bundle cannot say whether evidence lies on the object, only whether on the border."
)
WITH_LABELS = "A prediction counts as right if it matches the label; labels may be wrong."
WITHOUT_LABELS = "There are no labels that the model knows: the bundle cannot say which predictions are right."
